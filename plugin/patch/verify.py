"""Whether a module says the same before and after a change, on a small random input."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from opgraft.patch.change import Change

STEPS = 12
PLAIN_WIDTH = 64  # of the input of a norm without a weight


def disagreement(module: nn.Module, change: Change) -> tuple[float | None, float]:
    """Largest difference of outputs and gradients over their largest value, and what is allowed in the dtype.

    None where the module has no small input: it is not called with (batch, length, hidden).
    """
    checks = [swap.check for swap in change.swaps]
    if all(checks):
        return max(check() for check in checks if check is not None)
    made = _input(module)
    if made is None:
        return None, 0.0
    allowed = 64 * torch.finfo(made.dtype).eps
    try:
        before = _run(module, made)
    except (RuntimeError, TypeError, ValueError, AttributeError):
        return None, allowed
    change.do()
    try:
        after = _run(module, made)
    finally:
        change.undo()
    worst = 0.0
    for old, new in zip(before, after, strict=True):
        scale = old.abs().max().clamp_min(1e-6)
        worst = max(worst, ((old - new).abs().max() / scale).item())
    return (worst if worst == worst else float("inf")), allowed


def _input(module: nn.Module) -> torch.Tensor | None:
    width = getattr(module, "hidden_size", None)
    recurrent = getattr(module, "recurrent_param", None)
    if width is None and isinstance(recurrent, torch.Tensor):
        width = recurrent.shape[0]
    parameter: torch.Tensor | None = next((p for p in module.parameters() if p.is_floating_point()), None)
    if width is None and next(module.children(), None) is None:  # a norm
        width = PLAIN_WIDTH if parameter is None else parameter.shape[0]
        parameter = torch.empty(0) if parameter is None else parameter
    if not isinstance(width, int) or parameter is None or parameter.is_meta:
        return None
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(2, STEPS, width, generator=generator)
    return drawn.to(device=parameter.device, dtype=parameter.dtype)


def _run(module: nn.Module, made: torch.Tensor) -> list[torch.Tensor]:
    """Output, and the gradients of input and parameters. Leaves .grad, mode and kept states as they were."""
    kept: dict[str, Any] = {n: getattr(module, n) for n in ("recurrent_states",) if hasattr(module, n)}
    parameters = [p for p in module.parameters() if p.requires_grad]
    with torch.enable_grad():
        x = made.clone().requires_grad_()
        args = (torch.arange(STEPS, device=x.device).expand(2, -1),) if kept else ()
        try:
            for name in kept:
                setattr(module, name, None)
            out = module(x, *args)
        finally:
            for name, value in kept.items():
                setattr(module, name, value)
        out = out[0] if isinstance(out, tuple) else out
        # A random direction: the sum of squares of a norm's output is constant, and its gradient nothing but rounding.
        probe = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.device)
        grads = torch.autograd.grad((out.float() * probe).sum(), [x, *parameters], allow_unused=True)
    return [out.detach().float(), *(g.float() for g in grads if g is not None)]
