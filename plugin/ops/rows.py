"""What the ops over rows share: checks of a row's tensors and weight, vmap rules and sharding over rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from opgraft.ops.registration import batch_first, check_floating
from opgraft.ops.samples import Maker


def check_rows(op: str, argument: str, tensor: torch.Tensor) -> None:
    """The kernels' checks of a tensor whose last dimension is a row."""
    check_floating(op, argument, tensor)
    torch._check(tensor.dim() > 0, lambda: f"{op}: {argument} has no dimension, expected rows along its last one")


def check_row_weight(op: str, weight: torch.Tensor | None, x: torch.Tensor) -> None:
    """The kernels' checks of one weight an element of a row."""
    if weight is None:
        return
    check_floating(op, "weight", weight)
    torch._check(
        weight.device == x.device,
        lambda: f"{op}: weight is on {weight.device}, expected the device of x, {x.device}",
    )
    torch._check(
        weight.dim() == 1 and weight.shape[0] == x.shape[-1],
        lambda: f"{op}: weight has shape {tuple(weight.shape)}, expected one value an element of a row, "
        f"({x.shape[-1]},)",
    )


def map_rows(op: Any, info: Any, in_dims: tuple[Any, ...], args: tuple[Any, ...], rows: int, sums: bool) -> Any:
    """A vmap rule. The first ``rows`` arguments are tensors of rows, the mapped dimension is one more of theirs; what
    is there once for all rows (a weight that is mapped, a sum over rows) is mapped by a loop.

    Args:
        sums: the op gives a sum over rows where a weight is given.
    """
    there = [i for i in range(rows) if args[i] is not None]
    shared = [i for i in range(rows, len(args)) if isinstance(args[i], torch.Tensor)]
    if any(in_dims[i] is not None for i in shared) or (sums and shared):
        calls = [
            op(*(a if d is None else a.select(d, i) for a, d in zip(args, in_dims, strict=True)))
            for i in range(info.batch_size)
        ]
        if isinstance(calls[0], torch.Tensor):
            return torch.stack(calls), 0
        return tuple(torch.stack(parts) for parts in zip(*calls, strict=True)), (0,) * len(calls[0])
    moved = batch_first([in_dims[i] for i in there], info.batch_size, *(args[i] for i in there))
    placed = list(args)
    for i, tensor in zip(there, moved, strict=True):
        placed[i] = tensor
    found = op(*placed)
    if isinstance(found, torch.Tensor):
        return found, 0
    if sums:  # without a weight there is nothing to sum: an empty tensor for each
        found = (*found[:-1], found[-1].unsqueeze(0).expand(info.batch_size, *found[-1].shape))
    return found, (0,) * len(found)


def row_rule(rows: int, outputs: int, sums: bool) -> Any:
    """Sharding over every dimension but the row itself. Sums over rows are partial where rows are split."""

    def rule(*args: Any) -> list[tuple[list[Any], list[Any]]]:
        from torch.distributed.tensor import Partial, Replicate, Shard

        dims = next(a for a in args if a is not None).ndim
        found: list[tuple[list[Any], list[Any]]] = []
        for over in (None, *range(dims - 1)):
            split = Replicate() if over is None else Shard(over)
            weighted = len(args) > rows and hasattr(args[rows], "ndim")
            given: list[Any] = [split] * outputs
            if sums:
                given[-1] = Partial() if weighted and over is not None else Replicate()
            placed = [
                None if not hasattr(a, "ndim") else split if i < rows else Replicate() for i, a in enumerate(args)
            ]
            found.append((given, placed))
        return found

    return rule


def eps_for(x: torch.Tensor) -> float:
    """A row of one element is divided by itself: its gradient is the difference of two equal numbers but for eps."""
    return 4.0 if x.shape[-1] == 1 else 1e-6


def layouts_with_weights(device: torch.device, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor, Any]]:
    """Every layout of at least one dimension, in turn without a weight, with one of the dtype and with a wide one."""
    wide = torch.promote_types(dtype, torch.float32)
    index = 0
    for name, x in Maker(device, dtype).layouts():
        if not x.dim():
            continue
        weight = Maker(device, (dtype, wide)[index % 2], seed=10 + index).normal(x.shape[-1]) if index % 3 else None
        index += 1
        yield name, x, weight
