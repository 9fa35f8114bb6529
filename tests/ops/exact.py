"""Results in float64 for random cases: the references, with their scans walked serially.

A parallel prefix touches every element once a doubling, and its gradient is as many tensors again: of a few hundred
steps that is most of a case's time. A walk touches each once, by arithmetic of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from opgraft.ops import linear_scan, selective_scan_reference
from opgraft.registry import OpSpec

LONGEST_WALK = 512  # steps; a torch call each


def _walk(decay: torch.Tensor, update: torch.Tensor) -> torch.Tensor:
    """h[t] = decay[t] h[t-1] + update[t] along the first dimension, from zero."""
    if decay.shape[0] > LONGEST_WALK:
        return linear_scan.states(decay.movedim(0, -1), update.movedim(0, -1)).movedim(-1, 0)
    states = update.clone(memory_format=torch.contiguous_format)
    before: torch.Tensor | None = None
    for factor, state in zip(decay.contiguous().unbind(0), states.unbind(0), strict=True):
        if before is not None:
            state.addcmul_(factor, before)
        before = state
    return states


class _Walk(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, decay: torch.Tensor, update: torch.Tensor) -> torch.Tensor:
        timed = decay.movedim(-1, 0)
        states = _walk(timed, update.movedim(-1, 0))
        ctx.save_for_backward(timed, states)
        return states.movedim(0, -1)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        decay, states = ctx.saved_tensors
        # e[t] = grad[t] + decay[t+1] e[t+1], from the last step.
        later = torch.cat([decay[1:], torch.zeros_like(decay[:1])]).flip(0)
        to_update = _walk(later, grad.movedim(-1, 0).flip(0)).flip(0)
        before = torch.cat([torch.zeros_like(states[:1]), states[:-1]])
        return (to_update * before).movedim(0, -1), to_update.movedim(0, -1)


def _states(decay: torch.Tensor, update: torch.Tensor) -> torch.Tensor:
    walked: torch.Tensor = _Walk.apply(decay, update)
    return walked


def _linear_scan(
    decay: torch.Tensor, update: torch.Tensor, initial: torch.Tensor | None, dim: int, reverse: bool
) -> torch.Tensor:
    a, b = (t.movedim(dim, 0).flip(0) if reverse else t.movedim(dim, 0) for t in (decay, update))
    if initial is not None and a.shape[0]:
        b = torch.cat([torch.addcmul(b[:1], a[:1], initial.unsqueeze(0)), b[1:]])
    states = _walk(a, b)
    return (states.flip(0) if reverse else states).movedim(0, dim)


_selective_scan = partial(selective_scan_reference.scanned, _states)

_SERIAL: dict[str, Callable[..., Any]] = {
    "opgraft::linear_scan": _linear_scan,
    "opgraft::linear_scan_backward": partial(linear_scan._gradients, _states),
    "opgraft::selective_scan": _selective_scan,
    "opgraft::selective_scan_backward": partial(selective_scan_reference.gradients, _selective_scan),
}


def exact_function(spec: OpSpec) -> Callable[..., Any]:
    """What the op computes, of arguments in float64."""
    return _SERIAL.get(spec.name, spec.reference)
