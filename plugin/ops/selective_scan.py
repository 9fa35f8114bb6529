"""The selective state-space scan of Mamba (Gu and Dao, arXiv 2312.00752, algorithm 2), with real A.

With d = delta + delta_bias (through a softplus where asked for), for every channel and state:
h[t] = exp(d[t] A) h[t-1] + d[t] u[t] B[t];  y[t] = (sum over states of C[t] h[t] + D u[t]) silu(z[t]).
"""

from __future__ import annotations

from typing import Any

import torch

from opgraft.ops.registration import bind, call, require_tensor, shard
from opgraft.ops.selective_scan_backward import cost
from opgraft.ops.selective_scan_reference import reference
from opgraft.ops.selective_scan_rules import KINDS, check, map_groups, sharding_rule
from opgraft.ops.selective_scan_samples import large, samples
from opgraft.registry import OpSpec, register

_op = torch.ops.opgraft.selective_scan.default
_backward_op = torch.ops.opgraft.selective_scan_backward.default


def selective_scan(
    u: torch.Tensor,
    delta: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    delta_bias: torch.Tensor | None = None,
    delta_softplus: bool = False,
    initial_state: torch.Tensor | None = None,
    *,
    return_final_state: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Mamba's selective scan over (batch, channels, length).

    Args:
        u: (batch, channels, length), float32, float64, float16 or bfloat16.
        delta: the step sizes, alike.
        A: (channels, states), 1 to 256 states; real, as a rule negative.
        B: (channels, states), or (batch, states, length), or (batch, groups, states, length): constant, a step, or a
            step and group of neighbouring channels.
        C: as B.
        D: (channels,). z: as u. delta_bias: (channels,).
        delta_softplus: step sizes are softplus(delta + delta_bias).
        initial_state: (batch, channels, states), the state before the first step; zero where it is left out.
        return_final_state: also return the state after the last step, (batch, channels, states).

    Returns:
        A fresh contiguous tensor of the shape and dtype of ``u``. A, D, delta_bias, the state and all sums are float32
        (float64 for float64); the final state has that type.

    Raises:
        TypeError: an argument is no tensor. RuntimeError: shapes, dtypes or devices do not fit.
    """
    require_tensor("selective_scan", u=u, delta=delta, A=A, B=B, C=C)
    given = {"D": D, "z": z, "delta_bias": delta_bias, "initial_state": initial_state}
    require_tensor("selective_scan", **{name: value for name, value in given.items() if value is not None})
    wide = torch.promote_types(u.dtype, torch.float32) if u.is_floating_point() else u.dtype
    y, final_state = apply(
        u.contiguous(),
        delta.contiguous(),
        _to(A, wide),
        _per_step(_to(B, u.dtype), u),
        _per_step(_to(C, u.dtype), u),
        _to(D, wide),
        z.contiguous() if z is not None else None,
        _to(delta_bias, wide),
        delta_softplus,
        _to(initial_state, wide),
    )
    return (y, final_state) if return_final_state else y


def apply(
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
) -> tuple[torch.Tensor, torch.Tensor]:
    """The op with its own arguments: B and C a step and group, parameters in the state's type."""
    require_tensor("selective_scan", u=u, delta=delta, A=A, B=B, C=C)
    out: tuple[torch.Tensor, torch.Tensor] = call(
        _op, reference, u, delta, A, B, C, D, z, delta_bias, delta_softplus, initial_state
    )
    return out


def _to(tensor: Any, dtype: torch.dtype) -> Any:
    """In the wanted type; a parameter under autocast may have another. What is no number is left to the op's checks."""
    return tensor.to(dtype) if isinstance(tensor, torch.Tensor) and tensor.is_floating_point() else tensor


def _per_step(matrix: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """B or C as (batch, groups, states, length). A constant one has as many groups as there are channels."""
    if matrix.dim() == 3:
        return matrix.unsqueeze(1)
    if matrix.dim() == 2 and u.dim() == 3:
        return matrix[None, :, :, None].expand(u.shape[0], -1, -1, u.shape[2])
    return matrix


def _fake(
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
) -> tuple[torch.Tensor, torch.Tensor]:
    wide = check("selective_scan", u, delta, A, B, C, D, z, delta_bias, initial_state)
    return u.new_empty(u.shape), u.new_empty((u.shape[0], u.shape[1], A.shape[1]), dtype=wide)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    *tensors, ctx.delta_softplus, initial_state = inputs
    ctx.save_for_backward(*tensors, initial_state)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad: torch.Tensor | None, grad_final: torch.Tensor | None) -> tuple[Any, ...]:
    *tensors, initial_state = ctx.saved_tensors
    if grad is None and grad_final is None:
        return (None,) * 10
    grad = torch.zeros_like(tensors[0]) if grad is None else grad.contiguous()
    found = _backward_op(grad, grad_final, *tensors, ctx.delta_softplus, initial_state)
    u, delta, A, B, C, D, z, delta_bias, start = found
    given = (*tensors[5:], initial_state)
    optional = [None if g is None else f for g, f in zip(given, (D, z, delta_bias, start), strict=True)]
    return (u, delta, A, B, C, *optional[:3], None, optional[3])


def _vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
    return map_groups(_op, info.batch_size, in_dims, args, KINDS, ("row", "state"))


# B and C are walked with their strides and may be expanded, so that a compiler must not make all inputs contiguous; the
# others are made so above, where it fuses the copy with its producer and keeps it for the backward pass.
bind(_op, fake=_fake, backward=_backward, setup_context=_setup_context, vmap=_vmap, tags=("needs_exact_strides",))
shard(_op, sharding_rule(KINDS, ("row", "state")))

SPEC = register(
    OpSpec(
        _op, reference, samples=samples, cost=cost, public=apply, backward=_backward_op, large=large, owner="opgraft"
    )
)
