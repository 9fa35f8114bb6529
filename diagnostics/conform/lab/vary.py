"""Variations of a call along the ways that break kernels. Values stay the same unless the size changes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from opgraft.diagnostics.conform.lab.case import Case
from opgraft.diagnostics.conform.lab.tree import is_plain, map_tensors

# Around vector widths (4, 8, 16), warps and blocks, whole ones, and primes that fit no width.
SIZES = (1, 2, 3, 7, 8, 16, 17, 31, 32, 33, 64, 129, 257)


def permuted(tensor: torch.Tensor) -> torch.Tensor | None:
    """The same values with the last two dimensions swapped in memory."""
    if tensor.dim() < 2 or min(tensor.shape[-2:]) < 2:
        return None
    return tensor.transpose(-1, -2).contiguous().transpose(-1, -2)


def channels_last(tensor: torch.Tensor) -> torch.Tensor | None:
    """The same values with dimension 1 innermost."""
    if tensor.dim() < 3 or tensor.shape[1] < 2:
        return None
    return tensor.movedim(1, -1).contiguous().movedim(-1, 1)


def sliced(tensor: torch.Tensor) -> torch.Tensor | None:
    """Every second element along the last dimension of a tensor twice as wide."""
    if tensor.dim() < 1 or tensor.shape[-1] < 2:
        return None
    wide = torch.zeros(*tensor.shape[:-1], 2 * tensor.shape[-1], dtype=tensor.dtype, device=tensor.device)
    view = wide[..., ::2]
    view.copy_(tensor)
    return view


def padded(tensor: torch.Tensor) -> torch.Tensor | None:
    """Rows that lie further apart than they are long."""
    if tensor.dim() < 2 or tensor.shape[-2] < 2:
        return None
    wide = torch.zeros(*tensor.shape[:-1], tensor.shape[-1] + 3, dtype=tensor.dtype, device=tensor.device)
    view = wide[..., : tensor.shape[-1]]
    view.copy_(tensor)
    return view


def expanded(tensor: torch.Tensor) -> torch.Tensor | None:
    """The first row, repeated with stride 0. Other values than before."""
    if tensor.dim() < 1 or tensor.shape[0] < 2 or not tensor.dtype.is_floating_point:
        return None
    return tensor[:1].contiguous().expand(tensor.shape)


def shifted(tensor: torch.Tensor) -> torch.Tensor | None:
    """Contiguous, one element behind an aligned address."""
    if tensor.numel() == 0 or not tensor.is_contiguous():
        return None
    storage = torch.zeros(tensor.numel() + 1, dtype=tensor.dtype, device=tensor.device)
    storage[1:].copy_(tensor.reshape(-1))
    return storage[1:].view(tensor.shape)


LAYOUTS: tuple[tuple[str, Callable[[torch.Tensor], torch.Tensor | None]], ...] = (
    ("transposed in memory", permuted),
    ("channels last", channels_last),
    ("every second element", sliced),
    ("rows padded", padded),
)


def _each(case: Case, words: str, change: str, how: Callable[[torch.Tensor], torch.Tensor | None]) -> Iterator[Case]:
    """All tensors at once, then (where there are several) one at a time."""
    found = case.tensors
    plain = [tensor for tensor in found if is_plain(tensor)]
    if not plain:
        return
    selections: list[tuple[str, set[int]]] = [("every tensor", set(range(len(found))))]
    if len(found) > 1:
        selections = [(f"tensor {index}", {index}) for index in range(len(found))]
    for label, chosen in selections:
        index = -1
        changed = False

        def one(tensor: torch.Tensor, chosen: set[int] = chosen) -> torch.Tensor:
            nonlocal index, changed
            index += 1
            if index not in chosen or not is_plain(tensor):
                return tensor
            new = how(tensor.detach())
            if new is None:
                return tensor
            changed = True
            return new.requires_grad_(tensor.requires_grad) if tensor.requires_grad else new

        args, kwargs = map_tensors(one, (case.args, case.kwargs))
        if changed:
            yield case.varied(change, f"{label} {words}" if len(found) > 1 else words, args, kwargs)


def layouts(case: Case) -> Iterator[Case]:
    """The same values in other layouts."""
    for words, how in LAYOUTS:
        yield from _each(case, words, "layout", how)


def expansions(case: Case) -> Iterator[Case]:
    """Tensors whose first dimension has stride 0, each beside its dense twin: ``label`` ends in ``dense`` there."""
    yield from _each(case, "expanded", "layout", expanded)


def offsets(case: Case) -> Iterator[Case]:
    """Contiguous tensors that start one element behind an aligned address."""
    yield from _each(case, "starting one element later", "offset", shifted)


def dense(case: Case) -> Case:
    """The call with every tensor contiguous, aligned, and at the start of a storage of its own."""

    def one(tensor: torch.Tensor) -> torch.Tensor:
        if not is_plain(tensor):
            return tensor
        new = tensor.detach().clone(memory_format=torch.contiguous_format)
        return new.requires_grad_(tensor.requires_grad) if tensor.requires_grad else new

    args, kwargs = map_tensors(one, (case.args, case.kwargs))
    return case.varied("", "made contiguous", args, kwargs)


def extents(case: Case) -> list[int]:
    """The different sizes that occur in the tensors, each once, the most frequent first."""
    seen: dict[int, int] = {}
    for tensor in case.tensors:
        for size in tensor.shape:
            seen[size] = seen.get(size, 0) + 1
    return sorted(seen, key=lambda size: -seen[size])


def elements_with(case: Case, old: int, new: int) -> int:
    """How many elements the tensors would have with every extent ``old`` made ``new``."""
    return sum(math.prod(new if size == old else size for size in tensor.shape) for tensor in case.tensors)


def resized(case: Case, old: int, new: int, numbers: bool = True) -> Case | None:
    """The call with every extent ``old`` made ``new``, in the tensors and in integer arguments of that value."""
    opaque = any(tensor.layout != torch.strided and old in tensor.shape for tensor in case.tensors)
    if old == new or old == 0 or opaque:
        return None

    def one(tensor: torch.Tensor) -> torch.Tensor:
        value = tensor.detach()
        for dim, size in enumerate(tensor.shape):
            if size != old:
                continue
            index = torch.arange(new, device=tensor.device) % old
            value = value.index_select(dim, index)
        if value is not tensor and value.dtype.is_floating_point and new > old:
            # Repeated rows would hide a row that is never read. Small, for a number may be an index in disguise.
            place = torch.arange(value.numel(), dtype=torch.float64).reshape(value.shape) % 31
            value = value * (1 + 1e-3 * place).to(value)
        return value.requires_grad_(tensor.requires_grad) if tensor.requires_grad else value

    args, kwargs = map_tensors(one, (case.args, case.kwargs))
    if numbers:
        args = tuple(_renumber(value, old, new) for value in args)
        kwargs = {key: _renumber(value, old, new) for key, value in kwargs.items()}
    if not any(old in tensor.shape for tensor in case.tensors):
        return None
    change = "empty" if new == 0 else "size"
    varied = case.varied(change, f"extent {old} made {new}", args, kwargs)
    # Integers may count or point into an extent, be it their own; so may those of a list (sizes, strides, offsets).
    whole = (torch.int64, torch.int32, torch.int16)
    left = any(t.numel() and (old not in t.shape or t.dtype in whole) for t in case.tensors)
    listed = any(_whole_numbers(value) for value in (*args, *kwargs.values()))
    # More lengths, or offsets, come to more than there was.
    longer = new > old and any(old in t.shape and t.dtype in whole for t in case.tensors)
    return replace(varied, loose=True) if longer or (new < old and (left or listed)) else varied


def _whole_numbers(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and any(type(item) is int for item in value)


def _renumber(value: Any, old: int, new: int) -> Any:
    if isinstance(value, int) and not isinstance(value, bool) and value == old and old > 1:
        return new
    return value


def sizes(case: Case) -> Iterator[Case]:
    """Other extents, one dimension at a time."""
    for old in extents(case)[:4]:
        for new in SIZES:
            found = resized(case, old, new)
            if found is not None:
                yield found


def empties(case: Case) -> Iterator[Case]:
    """One extent made zero, for each of them."""
    for old in extents(case)[:4]:
        found = resized(case, old, 0, numbers=False)
        if found is not None:
            yield found


def recast(case: Case, dtype: torch.dtype) -> Case | None:
    """Every floating tensor in another dtype."""
    if not any(tensor.dtype.is_floating_point and tensor.dtype != dtype for tensor in case.tensors):
        return None

    def one(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.dtype.is_floating_point:
            return tensor
        new = tensor.detach().to(dtype)
        return new.requires_grad_(tensor.requires_grad) if tensor.requires_grad else new

    args, kwargs = map_tensors(one, (case.args, case.kwargs))
    return case.varied("dtype", str(dtype).removeprefix("torch."), args, kwargs)
