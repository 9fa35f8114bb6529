"""The meaning of selective_scan and of its gradients, in plain torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from opgraft.ops.linear_scan import states as scan_states
from opgraft.ops.registration import vector_jacobian_product


def reference(
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
    """The meaning, in plain torch: every state of every step, by a parallel prefix in float32 (float64 for float64)."""
    return scanned(scan_states, u, delta, A, B, C, D, z, delta_bias, delta_softplus, initial_state)


def scanned(
    scan: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
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
    wide = torch.promote_types(u.dtype, torch.float32)
    batch, channels, length = u.shape
    groups, states = B.shape[1], A.shape[1]
    inputs, steps, decays = u.to(wide), delta.to(wide), A.to(wide)
    if delta_bias is not None:
        steps = steps + delta_bias.to(wide).unsqueeze(-1)
    if delta_softplus:
        steps = F.softplus(steps)
    by_channel = (batch, channels, states, length)
    expand = (batch, groups, channels // max(groups, 1), states, length)
    b, c = (m.to(wide).unsqueeze(2).expand(expand).reshape(by_channel) for m in (B, C))
    decay = torch.exp(steps.unsqueeze(2) * decays.unsqueeze(-1))
    update = (steps * inputs).unsqueeze(2) * b
    start = u.new_zeros(batch, channels, states, dtype=wide) if initial_state is None else initial_state.to(wide)
    if length:
        update = torch.cat([update[..., :1] + decay[..., :1] * start.unsqueeze(-1), update[..., 1:]], dim=-1)
    h = scan(decay, update)
    y = (h * c).sum(2)
    if D is not None:
        y = y + D.to(wide).unsqueeze(-1) * inputs
    if z is not None:
        y = y * F.silu(z.to(wide))
    final_state = h[..., -1] if length else start
    return y.to(u.dtype).contiguous(), final_state.clone(memory_format=torch.contiguous_format)


def reference_backward(grad: torch.Tensor, grad_final: torch.Tensor | None, *inputs: Any) -> tuple[torch.Tensor, ...]:
    """The gradients of the reference with respect to every tensor, there or not, in the order of the arguments."""
    return gradients(reference, grad, grad_final, *inputs)


def gradients(
    function: Callable[..., Any], grad: torch.Tensor, grad_final: torch.Tensor | None, *inputs: Any
) -> tuple[torch.Tensor, ...]:
    u, delta, A, B, C, D, z, delta_bias, softplus, initial_state = inputs
    zeros = A.new_zeros(A.shape[0])
    filled = (
        u,
        delta,
        A,
        B,
        C,
        zeros if D is None else D,
        z,
        zeros if delta_bias is None else delta_bias,
        softplus,
        A.new_zeros(u.shape[0], *A.shape) if initial_state is None else initial_state,
    )
    found = list(vector_jacobian_product(function, filled, (grad, grad_final)))
    del found[8]
    given = [*filled[:6], u if z is None else z, filled[7], filled[9]]
    return tuple(
        torch.zeros_like(g, memory_format=torch.contiguous_format) if f is None else f.contiguous()
        for f, g in zip(found, given, strict=True)
    )
