"""Memory that an op allocates for itself, between guards and filled with a pattern.

While it is in force, ``aten::empty`` and ``aten::empty_strided`` hand out tensors from buffers of our own: a zone of
one byte before and behind each, and another byte (NaN, where it is 0xFF) all over the inside. A kernel that writes past
its result changes a zone; one that returns memory it never wrote returns the filling.

It works for every op that asks torch for memory, in C++, through the stable ABI or in Python, on the CPU and on CUDA.
It changes the whole process, so it belongs in a fork.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.weak import TensorWeakRef

from opgraft.diagnostics.conform.lab.tree import is_plain, span

GUARD_BYTES = 4096  # a multiple of every alignment that torch's allocators keep (64 on the CPU, 512 on CUDA)
# Larger ones are left to torch: filling them costs more than it tells.
MOST_BYTES = 1 << 28
ZONE = 0x84
# NaN in every floating dtype but the narrowest, the largest or -1 in integers.
FILLING = 0xFF


@dataclass(frozen=True)
class Allocation:
    """One buffer: ``flat`` is all of it as bytes, the tensor's own ones are ``[start, start + size)``.

    ``tensor`` gives the one that was handed out, as long as it lives: an op that resizes it sees a storage with room,
    and grows into its guard. Not held, for torch gives a tensor that another holds a new header.
    """

    flat: torch.Tensor
    start: int
    size: int
    zone: int
    address: int
    tensor: TensorWeakRef

    @property
    def replaced(self) -> bool:
        """The op has put memory of its own behind the storage, which a tensor within our guards then points past."""
        return self.flat.untyped_storage().nbytes() == self.flat.numel() and self.flat.data_ptr() != self.address

    def touched(self) -> int | None:
        """Distance in bytes from the start of the tensor to the first byte of a zone that was written, else None."""
        if self.flat.untyped_storage().nbytes() < self.flat.numel():
            return None  # given back or resized meanwhile
        if self.flat.data_ptr() != self.address:
            return None  # the op has put other memory behind the tensor
        tensor = self.tensor()
        if tensor is not None and is_plain(tensor):
            reach = (tensor.storage_offset() + span(tensor)) * tensor.element_size()
            if reach > self.start + self.size:
                return None
        end = self.start + self.size
        for first, part in ((0, self.flat[: self.start]), (end, self.flat[end:])):
            changed = (part != self.zone).nonzero()
            if len(changed):
                # The nearest one says most: the last before the tensor, the first behind it.
                nearest = changed[-1] if first == 0 else changed[0]
                return first + int(nearest) - self.start
        return None


@dataclass
class Allocations:
    """Everything that was allocated while the guards were in force."""

    made: list[Allocation] = field(default_factory=list)

    @property
    def replaced(self) -> bool:
        return any(allocation.replaced for allocation in self.made)

    def trespass(self) -> str:
        """What was written outside a buffer, in words; ``""`` where nothing was."""
        for allocation in self.made:
            where = allocation.touched()
            if where is not None and where < 0:
                return f"writes {-where} bytes before a tensor that it allocated ({allocation.size} bytes)"
            if where is not None:
                return f"writes behind a tensor that it allocated, from byte {where - allocation.size} past its end on"
        return ""


def _contiguous(size: Sequence[int]) -> list[int]:
    strides, step = [], 1
    for extent in reversed(size):
        strides.append(step)
        step *= max(extent, 1)
    return strides[::-1]


@functools.cache
def _blanks(place: str) -> dict[torch.dtype, torch.Tensor]:
    """An empty tensor of every dtype."""
    found = {}
    quantized = (torch.quint8, torch.qint8, torch.qint32, torch.quint4x2, torch.quint2x4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for dtype in {value for value in vars(torch).values() if isinstance(value, torch.dtype)}:
            if dtype not in quantized:
                with contextlib.suppress(Exception):
                    found[dtype] = torch.empty(0, dtype=dtype, device=place)
    return found


class _Maker:
    """Makes tensors without ``aten::empty``: from headers that were made before the guards came into force."""

    def __init__(self, zone: int, filling: int, kept: list[Allocation]) -> None:
        self.places = {"cpu": _blanks("cpu")}
        if torch.cuda.is_initialized():
            self.places["cuda"] = _blanks("cuda")
        self.zone, self.filling, self.kept = zone, filling, kept

    def header(self, dtype: torch.dtype, storage: Any, offset: int, size: Sequence[int], stride: Sequence[int]) -> Any:
        # A view of a blank may be given another storage; a blank itself stays blank.
        with torch.no_grad():
            view = self.places[storage.device.type][dtype].as_strided((0,), (1,))
            return view.set_(storage, offset, size, stride).detach()

    def make(self, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype | None, device: Any) -> torch.Tensor:
        dtype = dtype or torch.get_default_dtype()
        item = dtype.itemsize
        elements = 0 if 0 in size else 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
        # What is empty is often resized, and would grow into its own guard.
        guard = GUARD_BYTES if 0 < elements * item <= MOST_BYTES else 0
        storage = torch.UntypedStorage(elements * item + 2 * guard, device=device or "cpu")
        if guard:
            flat = self.header(torch.uint8, storage, 0, (storage.nbytes(),), (1,))
            flat.fill_(self.zone)
            # Any other byte than 0 and 1 is no bool at all.
            flat[guard : guard + elements * item].fill_(1 if dtype == torch.bool else self.filling)
        made: torch.Tensor = self.header(dtype, storage, guard // item, size, stride)
        if guard:
            self.kept.append(Allocation(flat, guard, elements * item, self.zone, flat.data_ptr(), TensorWeakRef(made)))
        return made


@contextlib.contextmanager
def guarded_allocations(zone: int = ZONE, filling: int = FILLING) -> Iterator[Allocations]:
    """Guards and fills everything that ops allocate inside of the ``with``."""
    kept = Allocations()
    maker = _Maker(zone, filling, kept.made)
    library = torch.library.Library("aten", "IMPL")

    def empty(
        size: Sequence[int],
        dtype: torch.dtype | None = None,
        layout: Any = None,
        device: Any = None,
        pin_memory: bool | None = None,
        memory_format: torch.memory_format | None = None,
    ) -> torch.Tensor:
        stride = _contiguous(size)
        if memory_format in (torch.channels_last, torch.channels_last_3d):
            # (n, c, spatial...): c innermost.
            order = [0, *range(2, len(size)), 1]
            dense = _contiguous([size[dim] for dim in order])
            stride = [dense[order.index(dim)] for dim in range(len(size))]
        return maker.make(size, stride, dtype, device)

    def empty_strided(
        size: Sequence[int],
        stride: Sequence[int],
        dtype: torch.dtype | None = None,
        layout: Any = None,
        device: Any = None,
        pin_memory: bool | None = None,
    ) -> torch.Tensor:
        return maker.make(size, stride, dtype, device)

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for key in [place.upper() for place in maker.places]:
                library.impl("empty.memory_format", empty, key)
                library.impl("empty_strided", empty_strided, key)
        yield kept
    finally:
        library._destroy()
