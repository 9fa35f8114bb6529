"""vmap of ops whose channels are independent: the mapped dimension becomes part of the channels, or of their groups."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def fold_mapped(
    op: Any,
    size: int,
    in_dims: tuple[Any, ...],
    args: tuple[Any, ...],
    kinds: tuple[str, ...],
    outputs: tuple[str, ...],
    axis_of: Callable[[str], int | None],
) -> tuple[Any, tuple[int, ...]]:
    """One call of ``op`` in place of ``size``. ``axis_of`` gives, by the kind of an argument or output, the dimension
    that takes the mapped one in, and None for a tensor that all of them share."""
    folded = []
    for kind, dim, value in zip(kinds, in_dims, args, strict=True):
        axis = axis_of(kind) if isinstance(value, torch.Tensor) else None
        if axis is None:
            folded.append(value)
            continue
        moved = value.unsqueeze(0).expand(size, *value.shape) if dim is None else value.movedim(dim, 0)
        folded.append(moved.movedim(0, axis).flatten(axis, axis + 1))
    unfolded = []
    for kind, value in zip(outputs, op(*folded), strict=True):
        axis = axis_of(kind)
        assert axis is not None, f"output of kind {kind} cannot be shared"
        unfolded.append(value.unflatten(axis, (size, value.shape[axis] // size)).movedim(axis, 0))
    return tuple(unfolded), (0,) * len(outputs)
