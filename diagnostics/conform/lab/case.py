"""One call of an op as data, and how it is printed as a snippet that runs."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch

from opgraft.diagnostics.conform.lab.tree import is_plain, leaves, span, tensors
from opgraft.diagnostics.model import Location

# Values of up to so many elements are printed out; larger ones are drawn at random in the snippet.
PRINTED_ELEMENTS = 12


@dataclass(frozen=True)
class Case:
    """One call: arguments, where it comes from, and what was changed of it.

    Attributes:
        args: positional arguments; tensors are templates that every use clones.
        origin: ``"recorded"``, ``"sample"`` or ``"generated"``.
        change: the way in which it was varied: ``""``, ``"layout"``, ``"offset"``, ``"empty"``, ``"size"``,
            ``"dtype"``, ``"far"``.
        label: the variation in words, such as ``"x transposed"``.
        autocast: the dtype of the autocast region around the call, ``""`` outside of one.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    origin: str = "generated"
    name: str = ""
    change: str = ""
    label: str = ""
    autocast: str = ""
    location: Location | None = None

    def varied(self, change: str, label: str, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Case:
        return replace(self, args=args, kwargs=self.kwargs if kwargs is None else kwargs, change=change, label=label)

    @property
    def tensors(self) -> list[torch.Tensor]:
        return tensors((self.args, self.kwargs))

    @property
    def title(self) -> str:
        """A few words that name the call in a report."""
        parts = [self.name or self.origin, self.label]
        return ", ".join(part for part in parts if part)


def describe_tensor(tensor: torch.Tensor) -> str:
    """``float32(4, 6)``, with the strides where they are not those of a contiguous tensor."""
    text = f"{str(tensor.dtype).removeprefix('torch.')}{tuple(tensor.shape)}"
    if is_plain(tensor) and not tensor.is_contiguous():
        text += f" strides {tuple(tensor.stride())}"
    if is_plain(tensor) and tensor.storage_offset():
        text += f" offset {tensor.storage_offset()}"
    return text


def describe_value(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return describe_tensor(value)
    if isinstance(value, (list, tuple)):
        inner = ", ".join(describe_value(item) for item in value)
        return f"[{inner}]"
    return repr(value)


def describe(case: Case) -> str:
    """The arguments in one line: dtypes, shapes and strides in place of values."""
    parts = [describe_value(value) for value in case.args]
    parts += [f"{key}={describe_value(value)}" for key, value in case.kwargs.items()]
    return ", ".join(parts)


def _dtype(dtype: torch.dtype) -> str:
    return "" if dtype == torch.float32 else f", dtype={dtype}"


def tensor_source(tensor: torch.Tensor) -> str:
    """An expression that makes a tensor of the same shape, strides, offset and dtype (and values, where few)."""
    device = "" if tensor.device.type == "cpu" else f", device={tensor.device.type!r}"
    if not is_plain(tensor):
        return f"...  # {tensor.layout} tensor of shape {tuple(tensor.shape)}"
    elements, offset = span(tensor), tensor.storage_offset()
    plain = tensor.is_contiguous() and offset == 0
    shape = tuple(tensor.shape) if plain else (elements + offset,)
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        narrow = tensor.dtype.is_floating_point and torch.finfo(tensor.dtype).bits < 16
        source = f"torch.randn({shape}{'' if narrow else _dtype(tensor.dtype)}{device})"
        source += f".to({tensor.dtype})" if narrow else ""
    elif plain and tensor.numel() <= PRINTED_ELEMENTS:
        source = f"torch.tensor({tensor.tolist()}, dtype={tensor.dtype}{device})"
    elif tensor.dtype == torch.bool:
        source = f"torch.rand({shape}{device}) > 0.5"
    else:
        values = tensor.double() if tensor.numel() else torch.zeros(1)
        low_value, high_value = int(values.min()), int(values.max()) + 1
        source = f"torch.randint({low_value}, {high_value}, {shape}, dtype={tensor.dtype}{device})"
    if not plain:
        source = f"({source}).as_strided({tuple(tensor.shape)}, {tuple(tensor.stride())}, {offset})"
    return source + (".requires_grad_()" if tensor.requires_grad else "")


def snippet(name: str, case: Case, tail: str = "print({call})", imports: tuple[str, ...] = ()) -> str:
    """A script that makes the inputs and calls the op; ``{call}`` in ``tail`` stands for the call."""
    lines = ["import torch", *(f"import {module}" for module in imports), "torch.manual_seed(0)"]
    words: list[str] = []
    count = 0

    def word(value: Any) -> str:
        nonlocal count
        if isinstance(value, torch.Tensor):
            count += 1
            lines.append(f"t{count} = {tensor_source(value)}")
            return f"t{count}"
        if isinstance(value, (list, tuple)) and tensors(value):
            return "[" + ", ".join(word(item) for item in value) + "]"
        if isinstance(value, (torch.dtype, torch.device, torch.layout, torch.memory_format)):
            return str(value) if not isinstance(value, torch.device) else f"torch.device({str(value)!r})"
        return repr(value)

    words += [word(value) for value in case.args]
    words += [f"{key}={word(value)}" for key, value in case.kwargs.items()]
    namespace, _, base = name.partition("::")
    call = f"torch.ops.{namespace}.{base}({', '.join(words)})"
    body = tail.format(call=call).splitlines()
    if case.autocast:
        body = [f"with torch.autocast('cpu', dtype=torch.{case.autocast}):", *(f"    {line}" for line in body)]
    return "\n".join([*lines, *body])


def plain_values(case: Case) -> tuple[Any, ...]:
    """The arguments that are no tensors, in order."""
    return tuple(leaf for leaf in leaves((case.args, case.kwargs)) if not isinstance(leaf, torch.Tensor))
