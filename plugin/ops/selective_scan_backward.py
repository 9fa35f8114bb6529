"""The gradients of selective_scan."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from opgraft.ops.linear_scan import linear_scan
from opgraft.ops.registration import bind, check_like, shard, vector_jacobian_product
from opgraft.ops.selective_scan_reference import gradients, reference_backward, scanned
from opgraft.ops.selective_scan_rules import KINDS, check, expect, map_groups, sharding_rule
from opgraft.ops.selective_scan_samples import backward_samples
from opgraft.registry import Cost, OpSpec, register

_op = torch.ops.opgraft.selective_scan_backward.default

GRADIENT_KINDS = ("row", "row", "channel", "matrix", "matrix", "channel", "row", "channel", "state")


def _backward_fake(
    grad: torch.Tensor,
    grad_final: torch.Tensor | None,
    u: torch.Tensor,
    delta: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None,
    z: torch.Tensor | None,
    delta_bias: torch.Tensor | None,
    delta_softplus: bool,
    initial_state: torch.Tensor | None,
) -> tuple[torch.Tensor, ...]:
    op = "selective_scan_backward"
    wide = check(op, u, delta, A, B, C, D, z, delta_bias, initial_state)
    check_like(op, "grad", grad, "u", u)
    state = (u.shape[0], u.shape[1], A.shape[1])
    if grad_final is not None:
        expect(op, "grad_final", grad_final, "(batch, channels, states)", state, (wide, u.device))
    row, channel = u.shape, (u.shape[1],)
    return (
        u.new_empty(row),
        u.new_empty(row),
        A.new_empty(A.shape),
        B.new_empty(B.shape),
        C.new_empty(C.shape),
        A.new_empty(channel),
        u.new_empty(row),
        A.new_empty(channel),
        A.new_empty(state),
    )


def _setup_backward_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    *tensors, ctx.delta_softplus, initial_state = inputs
    ctx.save_for_backward(*tensors, initial_state)


def _double_backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    *tensors, initial_state = ctx.saved_tensors
    # The reference with linear_scan in it: one graph for every length, which the reference's own prefix is not.
    inputs = (*tensors, ctx.delta_softplus, initial_state)
    return vector_jacobian_product(partial(gradients, partial(scanned, linear_scan)), inputs, grads)


def _vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
    return map_groups(_op, info.batch_size, in_dims, args, ("row", "state", *KINDS), GRADIENT_KINDS)


def cost(
    u: torch.Tensor,
    delta: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None,
    z: torch.Tensor | None,
    delta_bias: torch.Tensor | None,
    delta_softplus: bool,
    initial_state: torch.Tensor | None,
) -> Cost:
    """Every input once and every output once; an exponential and six operations a step, channel and state."""
    inputs = (u, delta, A, B, C, D, z, delta_bias, initial_state)
    moved = sum(t.numel() * t.element_size() for t in inputs if t is not None)
    states = u.shape[0] * A.numel() * A.element_size()
    work = u.numel() * A.shape[1]
    gates = u.numel() * (2 * int(delta_softplus) + int(z is not None))
    return Cost(moved + u.numel() * u.element_size() + states, 6 * work, work + gates)


def backward_cost(grad: torch.Tensor, grad_final: torch.Tensor | None, *inputs: Any) -> Cost:
    """The forward's inputs and the gradient once, a gradient of each once; the states are computed again."""
    forward = cost(*inputs)
    u, _, A, B = inputs[:4]
    narrow = 4 * u.numel() + 2 * B.numel()
    wide = A.numel() + 2 * A.shape[0] + 2 * u.shape[0] * A.numel()
    more = narrow * u.element_size() + wide * A.element_size()
    return Cost(forward.bytes + more, 4 * forward.flops, 2 * forward.exponentials)


bind(
    _op,
    fake=_backward_fake,
    backward=_double_backward,
    setup_context=_setup_backward_context,
    vmap=_vmap,
    tags=("needs_exact_strides",),
)
shard(_op, sharding_rule(("row", "state", *KINDS), GRADIENT_KINDS))

BACKWARD_SPEC = register(OpSpec(_op, reference_backward, samples=backward_samples, cost=backward_cost, owner="opgraft"))
