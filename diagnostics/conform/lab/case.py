"""One call of an op as data, and how it is printed as a snippet that runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from opgraft.diagnostics.conform.lab.tree import is_plain, leaves, span, tensors
from opgraft.diagnostics.model import Location

# Values of up to so many elements are printed out; larger ones are drawn at random in the snippet.
PRINTED_ELEMENTS = 12
SPARSE_BYTES = 1 << 28


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
        loose: an extent was made smaller that values of another tensor may point into, or a number was guessed that
            may.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    origin: str = "generated"
    name: str = ""
    change: str = ""
    label: str = ""
    autocast: str = ""
    location: Location | None = None
    loose: bool = False

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
    if (elements + offset) * tensor.element_size() > SPARSE_BYTES and not plain:
        # Memory that is never touched costs nothing.
        near = tensor_source(tensor.detach().clone(memory_format=torch.contiguous_format))
        source = f"torch.empty({elements + offset}{_dtype(tensor.dtype)}{device})"
        source += f".as_strided({tuple(tensor.shape)}, {tuple(tensor.stride())}, {offset}).copy_({near})"
        return source + (".requires_grad_()" if tensor.requires_grad else "")
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


def _wide(name: str, tensor: torch.Tensor) -> str:
    if not tensor.dtype.is_floating_point:
        return name
    return f"{name}.detach().double()" + (".requires_grad_()" if tensor.requires_grad else "")


def snippet(name: str, case: Case, tail: str = "print({call})", arrive: tuple[str, ...] = (), schema: str = "") -> str:
    """A script that makes the inputs and calls the op.

    Args:
        tail: the last lines, with the placeholders of ``witness``.
        arrive: statements that register the op.
    """
    lines = ["import torch", *arrive, "torch.manual_seed(0)"]
    sources: list[str] = []

    def word(value: Any, form: str) -> str:
        if isinstance(value, torch.Tensor):
            known = next((index for index, tensor in enumerate(seen) if tensor is value), None)
            if known is None:
                seen.append(value)
                sources.append(f"t{len(seen)} = {tensor_source(value)}")
                known = len(seen) - 1
            return form.replace("@", f"t{known + 1}")
        if isinstance(value, (list, tuple)) and tensors(value):
            return "[" + ", ".join(word(item, form) for item in value) + "]"
        if isinstance(value, torch.device):
            return f"torch.device({str(value)!r})"
        if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
            return str(value)
        if isinstance(value, float) and not math.isfinite(value):
            return f"float({str(value)!r})"
        return repr(value)

    seen: list[torch.Tensor] = []
    namespace, _, base = name.partition("::")
    function = f"torch.ops.{namespace}.{base}"

    def call(form: str) -> str:
        words = [word(value, form) for value in case.args]
        words += [f"{key}={word(value, form)}" for key, value in case.kwargs.items()]
        return ", ".join(words)

    arguments = call("@")
    names = ", ".join(f"t{index + 1}" for index in range(len(seen)))
    wide = [_wide(f"t{index + 1}", tensor) for index, tensor in enumerate(seen)]
    filled = {
        "{call}": f"{function}({arguments})",
        "{dense}": f"{function}({call('@.detach().clone(memory_format=torch.contiguous_format)')})",
        "{faked}": f"{function}({call('mode.from_tensor(@)')})",
        "{halved}": f"{function}({call('(@ * 0.5 if @.is_floating_point() else @)')})",
        "{wide}": "".join(f"{value}, " for value in wide).rstrip(),
        "{args}": arguments,
        "{names}": names,
        "{op}": function if "." in base else f"{function}.default",
        "{schema}": schema.replace('"', "'"),
    }
    text = tail
    for mark, value in filled.items():
        text = text.replace(mark, value)
    body = text.splitlines()
    if case.autocast and "autocast" not in tail:
        body = [f"with torch.autocast('cpu', dtype=torch.{case.autocast}):", *(f"    {line}" for line in body)]
    return "\n".join([*lines, *sources, *body])


def given(case: Case) -> list[Any]:
    """All arguments in one row, those by keyword behind the others."""
    return [*case.args, *case.kwargs.values()]


def taken(case: Case, values: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Other values in the order of ``given``, as positional and keyword arguments of the call."""
    place = len(case.args)
    return tuple(values[:place]), dict(zip(case.kwargs, values[place:], strict=True))


def called(op: Any, case: Case, values: Sequence[Any]) -> Any:
    """The call with other values, in the order of ``given``."""
    args, kwargs = taken(case, values)
    return op(*args, **kwargs)


def plain_values(case: Case) -> tuple[Any, ...]:
    """The arguments that are no tensors, in order."""
    return tuple(leaf for leaf in leaves((case.args, case.kwargs)) if not isinstance(leaf, torch.Tensor))
