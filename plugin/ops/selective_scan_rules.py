"""What the selective scans share: checks, and how their tensors fold under vmap and shard."""

from __future__ import annotations

from typing import Any

import torch

from opgraft.ops.folding import fold_mapped
from opgraft.ops.registration import check_floating, check_like

MAX_STATES = 256

# How a tensor takes part: rows (batch, channels, ...), matrices (batch, groups, ...), values a channel.
KINDS = ("row", "row", "channel", "matrix", "matrix", "channel", "row", "channel", "flag", "state")
_AXIS = {"row": 1, "state": 1, "matrix": 1, "channel": 0}


def map_groups(
    op: Any,
    size: int,
    in_dims: tuple[Any, ...],
    args: tuple[Any, ...],
    kinds: tuple[str, ...],
    outputs: tuple[str, ...],
) -> tuple[Any, tuple[int, ...]]:
    """A vmap rule by more groups of channels: every channel has an A of its own, every group a B and a C."""
    return fold_mapped(op, size, in_dims, args, kinds, outputs, _AXIS.get)


def sharding_rule(kinds: tuple[str, ...], outputs: tuple[str, ...]) -> Any:
    """Sharding over the batch (gradients of what a channel owns are partial sums), or over the channels where every
    rank keeps whole groups or all of a single one's matrices (whose gradients are then partial sums)."""

    def rule(*args: Any) -> list[tuple[list[Any], list[Any]]]:
        from torch.distributed.tensor import Partial, Replicate, Shard

        def place(kind: str, over: str | None, output: bool) -> Any:
            if over is None:
                return Replicate()
            if over == "batch":
                return (Partial() if output else Replicate()) if kind == "channel" else Shard(0)
            if kind == "matrix" and single:
                return Partial() if output else Replicate()
            return Shard(_AXIS[kind])

        single = args[kinds.index("matrix")].shape[1] == 1
        return [
            (
                [place(kind, over, True) for kind in outputs],
                [
                    None if k == "flag" or a is None else place(k, over, False)
                    for k, a in zip(kinds, args, strict=False)
                ],
            )
            for over in (None, "batch", "channels")
        ]

    return rule


def expect(op: str, argument: str, tensor: torch.Tensor, meaning: str, sizes: tuple[Any, ...], like: Any) -> None:
    """Shape ``sizes``, and dtype and device of ``like`` (a dtype and a device)."""
    dtype, device = like
    torch._check(tensor.dtype == dtype, lambda: f"{op}: {argument} has dtype {tensor.dtype}, expected {dtype}")
    torch._check(tensor.device == device, lambda: f"{op}: {argument} is on {tensor.device}, expected {device}")
    fits = tensor.dim() == len(sizes) and all(a == b for a, b in zip(tensor.shape, sizes, strict=True))
    torch._check(fits, lambda: f"{op}: {argument} has shape {tuple(tensor.shape)}, expected {meaning}, {tuple(sizes)}")


def check(
    op: str,
    u: torch.Tensor,
    delta: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None,
    z: torch.Tensor | None,
    delta_bias: torch.Tensor | None,
    initial_state: torch.Tensor | None,
) -> torch.dtype:
    """The kernels' checks; returns the dtype of the state."""
    check_floating(op, "u", u)
    torch._check(u.dim() == 3, lambda: f"{op}: u has shape {tuple(u.shape)}, expected (batch, channels, length)")
    batch, channels, length = u.shape
    wide = torch.promote_types(u.dtype, torch.float32)
    narrow_like, wide_like = (u.dtype, u.device), (wide, u.device)
    check_like(op, "delta", delta, "u", u)
    torch._check(
        A.dim() == 2 and A.shape[1] >= 1 and A.shape[1] <= MAX_STATES,
        lambda: f"{op}: A has shape {tuple(A.shape)}, expected (channels, states) with 1 to {MAX_STATES} states",
    )
    states = A.shape[1]
    expect(op, "A", A, "(channels, states)", (channels, states), wide_like)
    torch._check(
        B.dim() == 4 and B.shape[1] >= 1 and channels % B.shape[1] == 0,
        lambda: f"{op}: B has shape {tuple(B.shape)}, expected (batch, groups, states, length) with groups that "
        f"divide the {channels} channels",
    )
    for name, matrix in (("B", B), ("C", C)):
        sizes = (batch, B.shape[1], states, length)
        expect(op, name, matrix, "(batch, groups, states, length)", sizes, narrow_like)
    for name, vector in (("D", D), ("delta_bias", delta_bias)):
        if vector is not None:
            expect(op, name, vector, "one value a channel", (channels,), wide_like)
    if z is not None:
        check_like(op, "z", z, "u", u)
    if initial_state is not None:
        expect(op, "initial_state", initial_state, "(batch, channels, states)", (batch, channels, states), wide_like)
    return wide
