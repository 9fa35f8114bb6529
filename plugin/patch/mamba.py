"""The functions that transformers' Mamba family calls by name: short convolution, selective scan, and a step of each.

transformers defines them in every model's module as plain torch, and its mixers call them as globals of that module.
What the ops do not take (another activation, a width above 8, a device without kernels) goes to the original.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn

from opgraft.ops.causal_conv1d import MAX_WIDTH, causal_conv1d
from opgraft.ops.causal_conv1d_update import causal_conv1d_update_
from opgraft.ops.selective_scan import selective_scan
from opgraft.ops.selective_scan_rules import MAX_STATES
from opgraft.ops.selective_scan_update import selective_scan_update_
from opgraft.patch.change import Swap

_DEVICES = ("cpu", "cuda")
_ACTIVATIONS = (None, "silu", "swish")


def swaps(module: nn.Module) -> list[Swap]:
    """The swaps for a mixer: a module with a depthwise ``conv1d`` whose class's own module defines the functions."""
    source = sys.modules.get(type(module).__module__)
    if source is None or not source.__name__.startswith("transformers.") or not hasattr(module, "conv1d"):
        return []
    made = {
        "mamba_inner_fn": _inner,
        "causal_conv1d_fn": _convolution,
        "causal_conv1d_update": _convolution_step,
        "mamba_selective_scan": _scan,
        "mamba_selective_state_update": _scan_step,
    }
    return [Swap(source, name, new) for name, new in made.items() if hasattr(source, name)]


def _inner(original: Any) -> Any:
    """The mixer in one call, which transformers takes from mamba_ssm where that is installed, for training alone. None
    sends the mixer to the functions below, which the compiler sees into."""

    def mamba_inner_fn(*args: Any, **kwargs: Any) -> None:
        return None

    return mamba_inner_fn


def _convolution(original: Any) -> Any:
    def causal_conv1d_fn(
        hidden_states: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        activation: str | None = None,
        **kwargs: Any,
    ) -> Any:
        fits = hidden_states.device.type in _DEVICES and weight.shape[-1] <= MAX_WIDTH and activation in _ACTIVATIONS
        if not fits or kwargs.get("initial_states") is not None or kwargs.get("return_final_states"):
            return original(hidden_states, weight, bias, activation, **kwargs)
        seq_idx = kwargs.get("seq_idx")
        seq_idx = seq_idx if seq_idx is None else seq_idx.to(torch.int32)
        out = causal_conv1d(hidden_states.to(weight.dtype), weight, bias, None, activation, seq_idx=seq_idx)
        assert isinstance(out, torch.Tensor)
        return out.to(hidden_states.dtype)

    return causal_conv1d_fn


def _convolution_step(original: Any) -> Any:
    def causal_conv1d_update(
        hidden_states: torch.Tensor,
        conv_state: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        activation: str | None = None,
        **kwargs: Any,
    ) -> Any:
        one_step = hidden_states.dim() == 3 and hidden_states.shape[-1] == 1
        alike = hidden_states.dtype == conv_state.dtype == weight.dtype
        wide = weight.shape[-1] > MAX_WIDTH or conv_state.shape[-1] < weight.shape[-1] - 1
        fits = one_step and alike and not wide and hidden_states.device.type in _DEVICES and activation in _ACTIVATIONS
        if not fits or (torch.is_grad_enabled() and hidden_states.requires_grad):
            return original(hidden_states, conv_state, weight, bias, activation, **kwargs)
        return causal_conv1d_update_(hidden_states[..., 0], conv_state, weight, bias, activation).unsqueeze(-1)

    return causal_conv1d_update


def _scan(original: Any) -> Any:
    def mamba_selective_scan(
        hidden_states: torch.Tensor,
        dt: torch.Tensor,
        A: torch.Tensor,
        B: torch.Tensor,
        C: torch.Tensor,
        D: torch.Tensor | None = None,
        z: torch.Tensor | None = None,
        delta_bias: torch.Tensor | None = None,
        delta_softplus: bool = False,
        return_last_state: bool = False,
        **kwargs: Any,
    ) -> Any:
        if hidden_states.device.type not in _DEVICES or A.shape[-1] > MAX_STATES:
            return original(hidden_states, dt, A, B, C, D, z, delta_bias, delta_softplus, return_last_state, **kwargs)
        kind = hidden_states.dtype
        gate = z if z is None else z.to(kind)
        return selective_scan(
            hidden_states,
            dt.to(kind),
            A,
            B,
            C,
            D,
            gate,
            delta_bias,
            delta_softplus,
            return_final_state=return_last_state,
        )

    return mamba_selective_scan


def _scan_step(original: Any) -> Any:
    def mamba_selective_state_update(
        state: torch.Tensor,
        hidden_states: torch.Tensor,
        dt: torch.Tensor,
        A: torch.Tensor,
        B: torch.Tensor,
        C: torch.Tensor,
        D: torch.Tensor | None = None,
        dt_bias: torch.Tensor | None = None,
        dt_softplus: bool = False,
        z: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        kind = hidden_states.dtype
        wide = torch.promote_types(kind, torch.float32)
        fits = (
            hidden_states.device.type in _DEVICES and hidden_states.dim() == 2 and state.device == hidden_states.device
        )
        if not fits or A.shape[-1] > MAX_STATES or (torch.is_grad_enabled() and hidden_states.requires_grad):
            return original(state, hidden_states, dt, A, B, C, D, dt_bias, dt_softplus, z, **kwargs)
        kept = state if state.dtype == wide else state.to(wide)
        gate = z if z is None else z.to(kind)
        out = selective_scan_update_(
            kept, hidden_states, dt.to(kind), A.to(wide), B.to(kind), C.to(kind), D, gate, dt_bias, dt_softplus
        )
        if kept is not state:
            state.copy_(kept)
        return out

    return mamba_selective_state_update
