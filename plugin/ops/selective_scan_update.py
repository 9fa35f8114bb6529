"""One decoding step of selective_scan."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from opgraft.ops.registration import (
    bind,
    call,
    check_floating,
    check_like,
    meet,
    require_tensor,
    shard,
    vector_jacobian_product,
)
from opgraft.ops.samples import Maker
from opgraft.ops.selective_scan_reference import reference as scan_reference
from opgraft.ops.selective_scan_rules import MAX_STATES, expect, map_groups, sharding_rule
from opgraft.registry import Cost, OpSpec, Sample, register

_op = torch.ops.opgraft.selective_scan_update.default
_in_place_op = torch.ops.opgraft.selective_scan_update_.default


def selective_scan_update(
    state: torch.Tensor,
    u: torch.Tensor,
    delta: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    delta_bias: torch.Tensor | None = None,
    delta_softplus: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One step of the scan, without touching ``state``.

    Args:
        state: (batch, channels, states), float32 (float64 for float64).
        u, delta, z: (batch, channels). A: (channels, states). D, delta_bias: (channels,).
        B, C: (batch, states) or (batch, groups, states).
        delta_softplus: as in selective_scan.

    Returns:
        The step's output, (batch, channels), and the next state.

    Raises:
        TypeError: an argument is no tensor. RuntimeError: shapes, dtypes or devices do not fit.
    """
    given = _arguments("selective_scan_update", state, u, delta, A, B, C, D, z, delta_bias)
    out, next_state = call(_op, reference, *given, delta_softplus)
    return out, next_state


def selective_scan_update_(
    state: torch.Tensor,
    u: torch.Tensor,
    delta: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    delta_bias: torch.Tensor | None = None,
    delta_softplus: bool = False,
) -> torch.Tensor:
    """The same, with ``state`` replaced by the next one in its own memory; returns the step's output. No gradient."""
    given = _arguments("selective_scan_update_", state, u, delta, A, B, C, D, z, delta_bias)
    out: torch.Tensor = _in_place_op(*given, delta_softplus)
    return out


def _arguments(
    op: str, state: Any, u: Any, delta: Any, A: Any, B: Any, C: Any, D: Any, z: Any, bias: Any
) -> tuple[Any, ...]:
    require_tensor(op, state=state, u=u, delta=delta, A=A, B=B, C=C)
    given = {"D": D, "z": z, "delta_bias": bias}
    require_tensor(op, **{name: value for name, value in given.items() if value is not None})
    meet(state, u, delta, A, B, C)
    b, c = (m.unsqueeze(1) if m.dim() == 2 else m for m in (B, C))
    skip, bias = (None if v is None else v.to(state.dtype) for v in (D, bias))
    return state, u, delta, A.to(state.dtype), b, c, skip, z, bias


def reference(
    state: torch.Tensor,
    u: torch.Tensor,
    delta: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None,
    z: torch.Tensor | None,
    delta_bias: torch.Tensor | None,
    delta_softplus: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The meaning: the scan's reference over a single step."""
    steps = (None if t is None else t.unsqueeze(-1) for t in (u, delta, B, C, z))
    u_, delta_, B_, C_, z_ = steps
    y, next_state = scan_reference(u_, delta_, A, B_, C_, D, z_, delta_bias, delta_softplus, state)  # type: ignore[arg-type]
    return y.squeeze(-1).contiguous(), next_state


def _check(op: str, state: torch.Tensor, u: torch.Tensor, *others: torch.Tensor | None) -> None:
    delta, A, B, C, D, z, bias = others
    check_floating(op, "u", u)
    torch._check(u.dim() == 2, lambda: f"{op}: u has shape {tuple(u.shape)}, expected (batch, channels)")
    assert delta is not None
    assert A is not None
    assert B is not None
    assert C is not None
    check_like(op, "delta", delta, "u", u)
    batch, channels = u.shape
    wide = torch.promote_types(u.dtype, torch.float32)
    torch._check(
        A.dim() == 2 and A.shape[1] >= 1 and A.shape[1] <= MAX_STATES,
        lambda: f"{op}: A has shape {tuple(A.shape)}, expected (channels, states) with 1 to {MAX_STATES} states",
    )
    states = A.shape[1]
    expect(op, "A", A, "(channels, states)", (channels, states), (wide, u.device))
    torch._check(
        B.dim() == 3 and B.shape[1] >= 1 and channels % B.shape[1] == 0,
        lambda: f"{op}: B has shape {tuple(B.shape)}, expected (batch, groups, states) with groups that divide the "
        f"{channels} channels",
    )
    for name, matrix in (("B", B), ("C", C)):
        expect(op, name, matrix, "(batch, groups, states)", (batch, B.shape[1], states), (u.dtype, u.device))
    for name, vector in (("D", D), ("delta_bias", bias)):
        if vector is not None:
            expect(op, name, vector, "one value a channel", (channels,), (wide, u.device))
    if z is not None:
        check_like(op, "z", z, "u", u)
    expect(op, "state", state, "(batch, channels, states)", (batch, channels, states), (wide, u.device))


def _fake(state: torch.Tensor, u: torch.Tensor, *others: Any) -> tuple[torch.Tensor, torch.Tensor]:
    _check("selective_scan_update", state, u, *others[:-1])
    return u.new_empty(u.shape), state.new_empty(state.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    *tensors, ctx.delta_softplus = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    return vector_jacobian_product(reference, (*ctx.saved_tensors, ctx.delta_softplus), grads)


_KINDS = ("state", "row", "row", "channel", "matrix", "matrix", "channel", "row", "channel", "flag")


def _vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
    return map_groups(_op, info.batch_size, in_dims, args, _KINDS, ("row", "state"))


def cost(state: torch.Tensor, u: torch.Tensor, delta: torch.Tensor, A: torch.Tensor, *others: Any) -> Cost:
    """The state once in and once out, everything else once; an exponential a state."""
    inputs = [t for t in (state, u, delta, A, *others) if isinstance(t, torch.Tensor)]
    moved = sum(t.numel() * t.element_size() for t in inputs)
    return Cost(
        moved + state.numel() * state.element_size() + u.numel() * u.element_size(), 6 * state.numel(), state.numel()
    )


def samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    """Groups, state sizes, with and without what is optional."""
    maker = Maker(device, dtype, seed=22)
    wide = Maker(device, torch.promote_types(dtype, torch.float32), seed=23)

    def sample(
        name: str, batch: int, channels: int, states: int, groups: int = 1, full: bool = True, family: str = ""
    ) -> Sample:
        row, matrix = (batch, channels), (batch, groups, states)
        args = (
            wide.normal(batch, channels, states),
            maker.normal(*row),
            maker.normal(*row) if full else maker.uniform(*row, high=0.5),
            -wide.uniform(channels, states, low=0.2, high=2.0),
            maker.normal(*matrix),
            maker.normal(*matrix),
            wide.normal(channels) if full else None,
            maker.normal(*row) if full else None,
            wide.normal(channels, scale=0.3) if full else None,
            full,
        )
        return Sample(name, args, family=family)

    yield sample("dense", 2, 4, 16)
    yield sample("ragged", 3, 5, 3, full=False)
    yield sample("groups", 2, 6, 8, 3)
    yield sample("one state", 1, 4, 1)
    yield sample("most states", 1, 2, MAX_STATES)
    yield sample("no batch", 0, 4, 16)
    for batch, channels in ((2, 5), (4, 7), (6, 11)):
        yield sample(f"{batch} by {channels}", batch, channels, 8, family="rows")
    args = list(sample("permuted", 3, 6, 4).args)
    args[0] = args[0].transpose(1, 2).contiguous().transpose(1, 2)
    args[1] = args[1].t().contiguous().t()
    yield Sample("permuted", tuple(args))


def _in_place_fake(state: torch.Tensor, u: torch.Tensor, *others: Any) -> torch.Tensor:
    _check("selective_scan_update_", state, u, *others[:-1])
    return u.new_empty(u.shape)


bind(_op, fake=_fake, backward=_backward, setup_context=_setup_context, vmap=_vmap, tags=("flexible_layout",))
torch.library.register_fake("opgraft::selective_scan_update_", _in_place_fake)
shard(_op, sharding_rule(_KINDS, ("row", "state")))

SPEC = register(OpSpec(_op, reference, samples=samples, cost=cost, owner="opgraft"))
