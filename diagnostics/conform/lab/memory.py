"""Fresh copies of an argument, with the same strides, offset and alignment, and memory that is watched.

A guarded copy lies in a buffer of our own between two zones of a pattern; the storage that torch sees ends exactly
where the tensor does. Elements that the strides skip hold the pattern too. A kernel that writes outside its tensors
changes the pattern; one that reads there gives another result when the pattern is another.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from typing import Any

import torch

from opgraft.diagnostics.conform.lab.case import Case
from opgraft.diagnostics.conform.lab.tree import is_plain, map_tensors, span

GUARD_BYTES = 4096
ALIGNMENT = 64  # what torch's CPU allocator gives
# An offset into a storage of more elements than this is cut down to one of the same alignment.
OFFSET_ELEMENTS = 4096
# From here on memory is reserved page by page, so that a far-reaching view costs what it touches.
SPARSE_BYTES = 1 << 28


def _offset(tensor: torch.Tensor) -> int:
    """An offset in elements that puts a copy on an address of the same alignment."""
    offset = int(tensor.storage_offset())
    if offset > OFFSET_ELEMENTS:
        offset = ALIGNMENT + offset % ALIGNMENT
    if offset == 0 and tensor.device.type == "cpu" and tensor.numel():
        rest = tensor.data_ptr() % ALIGNMENT
        if rest % 16 and rest % tensor.element_size() == 0:
            offset = rest // tensor.element_size()
    return offset


def fresh(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in memory of its own with the same shape, strides, alignment and ``requires_grad``."""
    source = tensor.detach()
    if not is_plain(source) or type(source).__name__ == "FakeTensor":
        copy = source.clone()
    else:
        elements, offset = span(source), _offset(source)
        if elements * source.element_size() > SPARSE_BYTES:
            copy = _sparse(source, elements, offset)
        else:
            storage = torch.empty(offset + elements, dtype=source.dtype, device=source.device)
            if elements:
                flat = source.as_strided((elements,), (1,), source.storage_offset())
                storage[offset:].copy_(flat)
            copy = storage.as_strided(source.shape, source.stride(), offset)
    return copy.requires_grad_(tensor.requires_grad) if tensor.requires_grad else copy


def _sparse(source: torch.Tensor, elements: int, offset: int) -> torch.Tensor:
    if source.device.type == "cpu":
        pages = mmap.mmap(-1, (offset + elements) * source.element_size())
        storage = torch.frombuffer(pages, dtype=source.dtype)
    else:
        storage = torch.empty(offset + elements, dtype=source.dtype, device=source.device)
    copy = storage.as_strided(source.shape, source.stride(), offset)
    copy.copy_(source)
    return copy


@dataclass(frozen=True)
class Zone:
    """The memory around one guarded tensor: the whole buffer, and the mask of bytes that nobody may write."""

    flat: torch.Tensor
    before: torch.Tensor
    mask: torch.Tensor
    label: str

    def touched(self) -> int | None:
        """The distance in bytes from the tensor of the first changed byte, or None where all are as they were."""
        changed = ((self.flat != self.before) & self.mask).nonzero()
        return int(changed[0]) - GUARD_BYTES if len(changed) else None


def _buffer(size: int, pattern: int, like: torch.Tensor) -> torch.Tensor:
    """Bytes that hold the pattern. On the CPU torch sees no more of them than each tensor that is laid into them."""
    if like.device.type == "cpu":
        return torch.frombuffer(bytearray([pattern]) * size, dtype=torch.uint8)
    return torch.full((size,), pattern, dtype=torch.uint8, device=like.device)


def _laid(whole: torch.Tensor, source: torch.Tensor, elements: int, start: int) -> torch.Tensor:
    """A tensor like ``source`` in the buffer, from byte ``start`` on."""
    if source.device.type == "cpu":
        flat = torch.frombuffer(whole.numpy(), dtype=source.dtype, count=elements, offset=start)
        return flat.as_strided(source.shape, source.stride())
    flat = whole[start : start + elements * source.element_size()].view(source.dtype)
    return flat.as_strided(source.shape, source.stride())


def guarded(tensor: torch.Tensor, pattern: int, label: str) -> tuple[torch.Tensor, Zone | None]:
    """A copy of a tensor between two zones that hold ``pattern``, and the zones; a plain copy where that cannot be."""
    source = tensor.detach()
    elements = span(source)
    size = elements * source.element_size()
    if not is_plain(source) or source.device.type not in ("cpu", "cuda") or size > SPARSE_BYTES or elements == 0:
        return fresh(tensor), None
    whole = _buffer(2 * GUARD_BYTES + 2 * ALIGNMENT + size, pattern, source)
    shift = (_offset(source) * source.element_size()) % ALIGNMENT
    start = GUARD_BYTES + (shift - whole.data_ptr() - GUARD_BYTES) % ALIGNMENT
    copy = _laid(whole, source, elements, start)
    if 0 in source.stride():
        keep = [slice(None) if stride else slice(0, 1) for stride in source.stride()]
        copy[tuple(keep)].copy_(source[tuple(keep)])
    else:
        copy.copy_(source)
    own = torch.zeros(elements, dtype=torch.bool, device=source.device)
    own.as_strided(source.shape, source.stride()).fill_(True)
    mask = torch.ones(whole.numel(), dtype=torch.bool, device=source.device)
    mask[start : start + size] = ~own.repeat_interleave(source.element_size())
    zone = Zone(whole, whole.clone(), mask, label)
    return copy.requires_grad_(tensor.requires_grad) if tensor.requires_grad else copy, zone


def fresh_call(case: Case, requires_grad: bool | None = None) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call in fresh memory; ``requires_grad=False`` takes the flag away from all of them."""

    def one(tensor: torch.Tensor) -> torch.Tensor:
        copy = fresh(tensor)
        return copy if requires_grad is None else copy.detach().requires_grad_(requires_grad and _can_require(copy))

    args, kwargs = map_tensors(one, (case.args, case.kwargs))
    return args, kwargs


def fresh_values(case: Case, requires_grad: bool | None = False) -> list[Any]:
    """The same in one row, in the order of ``case.given``."""
    args, kwargs = fresh_call(case, requires_grad)
    return [*args, *kwargs.values()]


def guarded_call(case: Case, pattern: int) -> tuple[tuple[Any, ...], dict[str, Any], list[Zone]]:
    """The arguments of a call in guarded memory, and the zones to look at after it."""
    zones: list[Zone] = []

    def one(tensor: torch.Tensor) -> torch.Tensor:
        copy, zone = guarded(tensor.detach(), pattern, f"tensor {len(zones)}")
        if zone is not None:
            zones.append(zone)
        return copy

    args, kwargs = map_tensors(one, (case.args, case.kwargs))
    return args, kwargs, zones


def _can_require(tensor: torch.Tensor) -> bool:
    return tensor.dtype.is_floating_point or tensor.dtype.is_complex
