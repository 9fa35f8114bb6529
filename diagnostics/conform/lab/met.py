"""The calls of custom ops that a run really makes, as they are met: arguments kept, in bounded memory.

Imports nothing of torch: it works in a program that has not imported it yet.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Any

from opgraft.diagnostics.model import Location

MOST_BYTES = 256 << 20
MOST_BYTES_OF_ONE = 64 << 20
MOST_CALLS_OF_AN_OP = 8
ALIGNMENT = 64


@dataclass(frozen=True)
class Kept:
    """A tensor that was met. ``flat`` holds the memory that it spans, ``values`` (contiguous) where it spans too much;
    without either only its form is known."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: Any
    device: str
    offset: int
    align: int
    requires_grad: bool
    flat: Any = None
    values: Any = None


@dataclass
class Met:
    """One kind of call: an op with arguments of these forms, from this place.

    Attributes:
        how: ``"eager"``, ``"traced"`` (on tensors without data) or ``"compiled"``.
        count: how often it was met.
        error: type and text of what it raised, ``""`` where it came back.
        sizes: positions of the integer arguments that were given as symbolic sizes.
        subclass: the type of the first tensor that is of a class of somebody's own, ``""`` where none is.
    """

    name: str
    how: str
    args: Any
    kwargs: Any
    location: Location | None
    autocast: str = ""
    grad: bool = False
    exporting: bool = False
    error: str = ""
    count: int = 1
    sizes: tuple[int, ...] = ()
    sharded: bool = False
    subclass: str = ""
    order: int = 0


@dataclass
class Book:
    """Everything that was met in one run."""

    calls: dict[Any, Met] = field(default_factory=dict)
    used: int = 0
    events: list[dict[str, Any]] = field(default_factory=list)
    error: str = ""

    def room(self, size: int) -> bool:
        return size <= MOST_BYTES_OF_ONE and self.used + size <= MOST_BYTES


def _hint(value: Any) -> int:
    """A size as a number, without a guard on it; 0 for one that is unknown."""
    if isinstance(value, int):
        return int(value)
    node = getattr(value, "node", None)
    hint = getattr(node, "hint", None)
    return int(hint) if isinstance(hint, int) else 0


def is_data_less(tensor: Any) -> bool:
    """A stand-in of the tracer: fake, functional, meta, or a wrapper around one."""
    kind = type(tensor).__name__
    return kind in ("FakeTensor", "FunctionalTensor") or tensor.device.type == "meta"


def form(value: Any, requires_grad: bool = True) -> Any:
    """What tells one kind of call from another: shapes, strides, dtypes and flags of tensors, values of the rest."""
    torch = sys.modules["torch"]
    if isinstance(value, torch.Tensor):
        strided = value.layout == torch.strided
        data_less = is_data_less(value)
        address = 0
        if (
            strided
            and not data_less
            and value.device.type in ("cpu", "cuda")
            and type(value) in (torch.Tensor, torch.nn.Parameter)
        ):
            address = value.data_ptr() % ALIGNMENT
        return (
            tuple(_hint(size) for size in value.shape),
            tuple(_hint(step) for step in value.stride()) if strided else (),
            value.dtype,
            value.device.type,
            value.requires_grad,
            address,
            type(value).__name__,
        )
    if isinstance(value, (list, tuple)):
        return tuple(form(item) for item in value)
    if isinstance(value, dict):
        return tuple((key, form(item)) for key, item in sorted(value.items()))
    if isinstance(value, torch.SymInt):
        return _hint(value)
    if isinstance(value, (int, float, str, bool, type(None))):
        return value
    return repr(type(value))


def keep(value: Any, book: Book) -> Any:
    """A copy of an argument for later, within the book's bounds."""
    torch = sys.modules["torch"]
    if isinstance(value, torch.Tensor):
        return _keep_tensor(value, book)
    if isinstance(value, (list, tuple)):
        return type(value)(keep(item, book) for item in value) if type(value) in (list, tuple) else list(value)
    if isinstance(value, dict):
        return {key: keep(item, book) for key, item in value.items()}
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return _hint(value)
    return value


def _keep_tensor(tensor: Any, book: Book) -> Any:
    torch = sys.modules["torch"]
    strided = tensor.layout == torch.strided
    shape = tuple(_hint(size) for size in tensor.shape)
    stride = tuple(_hint(step) for step in tensor.stride()) if strided else ()
    data_less = is_data_less(tensor) or type(tensor) not in (torch.Tensor, torch.nn.Parameter)
    offset = _hint(tensor.storage_offset()) if strided else 0
    flat = values = None
    align = 0
    if not data_less and strided and not tensor.is_quantized:
        span = 0 if 0 in shape else 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
        item = tensor.element_size()
        if tensor.device.type in ("cpu", "cuda") and span:
            align = tensor.data_ptr() % ALIGNMENT
        source = tensor.detach()
        if book.room(span * item):
            book.used += span * item
            flat = source.as_strided((span,), (1,), offset).clone()
        elif book.room(tensor.numel() * item):
            book.used += tensor.numel() * item
            values = source.clone(memory_format=torch.contiguous_format)
    return Kept(
        shape=shape,
        stride=stride,
        dtype=tensor.dtype,
        device=tensor.device.type,
        offset=offset,
        align=align,
        requires_grad=bool(tensor.requires_grad),
        flat=flat,
        values=values,
    )


def rebuild(value: Any) -> Any:
    """A tensor like the one that was kept: same values where they were kept, drawn at random where not."""
    if isinstance(value, Kept):
        return _rebuild_tensor(value)
    if isinstance(value, (list, tuple)):
        return type(value)(rebuild(item) for item in value)
    if isinstance(value, dict):
        return {key: rebuild(item) for key, item in value.items()}
    return value


def _rebuild_tensor(kept: Kept) -> Any:
    import mmap

    torch = sys.modules["torch"]
    span = 0 if 0 in kept.shape else 1 + sum((n - 1) * s for n, s in zip(kept.shape, kept.stride, strict=True))
    item = kept.dtype.itemsize
    place = kept.device if kept.device != "meta" else "cpu"
    if kept.flat is not None:
        lead = kept.align // item if kept.align % item == 0 else 0
        if kept.offset and not lead:
            lead = ALIGNMENT
        storage = torch.zeros(lead + span, dtype=kept.dtype, device=place)
        storage[lead:] = kept.flat
        made = storage.as_strided(kept.shape, kept.stride, lead)
    elif kept.values is not None:
        if place == "cpu":
            pages = mmap.mmap(-1, max((span + 64) * item, 1))
            storage = torch.frombuffer(pages, dtype=kept.dtype)
        else:
            storage = torch.empty(span, dtype=kept.dtype, device=place)
        made = storage.as_strided(kept.shape, kept.stride, 0)
        made.copy_(kept.values)
    else:
        generator = torch.Generator().manual_seed(0)
        if kept.dtype.is_floating_point or kept.dtype.is_complex:
            flat = torch.randn(span, generator=generator, dtype=torch.float64).to(kept.dtype)
        elif kept.dtype == torch.bool:
            flat = torch.rand(span, generator=generator) > 0.5
        else:
            # 0 and 1 are indices, lengths and labels that nearly every op takes.
            flat = torch.randint(0, 2, (span,), generator=generator).to(kept.dtype)
        made = (
            flat.to(place).as_strided(kept.shape, kept.stride)
            if kept.stride or not kept.shape
            else flat.view(kept.shape)
        )
    return made.requires_grad_(True) if kept.requires_grad and kept.dtype.is_floating_point else made
