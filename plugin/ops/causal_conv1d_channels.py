"""How the causal convolutions are mapped and sharded: channels are independent, and so are batches but for the weights.

An argument's kind says where its channels are: ``x``, ``state``, ``step``, ``weight`` (weight and bias), ``seq_idx``,
``flag``.
"""

from __future__ import annotations

from typing import Any

import torch

from opgraft.ops.folding import fold_mapped


def map_channels(
    op: Any,
    size: int,
    in_dims: tuple[Any, ...],
    args: tuple[Any, ...],
    kinds: tuple[str, ...],
    outputs: tuple[str, ...],
) -> tuple[Any, tuple[int, ...]]:
    """A vmap rule by more channels: every channel has weights of its own, so the mapped dimension becomes part of
    the channels. Only the packing of rows, which channels share, is mapped by a loop."""
    if any(kind == "seq_idx" and dim is not None for kind, dim in zip(kinds, in_dims, strict=False)):
        calls = [
            op(*(a if d is None else a.select(d, i) for a, d in zip(args, in_dims, strict=True))) for i in range(size)
        ]
        return tuple(torch.stack(parts) for parts in zip(*calls, strict=True)), (0,) * len(outputs)
    channel_last = bool(args[-1]) if "seq_idx" in kinds else False

    def axis_of(kind: str) -> int | None:
        return None if kind == "seq_idx" else _channel_axis(kind, channel_last)

    return fold_mapped(op, size, in_dims, args, kinds, outputs, axis_of)


def _channel_axis(kind: str, channel_last: bool) -> int:
    return {"x": 2 if channel_last else 1, "state": 1, "step": 1, "weight": 0}[kind]


def _placements(kind: str, over: str | None, channel_last: bool) -> Any:
    """How a tensor of one kind is placed where the mesh splits the batch, the channels or nothing."""
    from torch.distributed.tensor import Replicate, Shard

    if over is None or (over == "batch" and kind == "weight") or (over == "channels" and kind == "seq_idx"):
        return Replicate()
    return Shard(0 if over == "batch" else _channel_axis(kind, channel_last))


def channel_rule(kinds: tuple[str, ...], outputs: tuple[str, ...]) -> Any:
    """Sharding over batch or channels. Over the batch, gradients of the weights are partial sums."""

    def rule(*args: Any) -> list[tuple[list[Any], list[Any]]]:
        from torch.distributed.tensor import Partial

        channel_last = args[-1]
        found = []
        for over in (None, "batch", "channels"):
            placed = [
                None if kind == "flag" or arg is None else _placements(kind, over, channel_last)
                for kind, arg in zip(kinds, args, strict=False)
            ]
            given = [
                Partial() if kind == "weight" and over == "batch" else _placements(kind, over, channel_last)
                for kind in outputs
            ]
            found.append((given, placed))
        return found

    return rule
