"""Whether a candidate gives right values: against the same graph in float64, before anything is timed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

_WIDE = frozenset(["float", "half", "bfloat16"])
# How far from float64 a result may be, as a share of the result's own size, when the compiler's code is no worse.
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 4e-2}
_TIMES_THE_COMPILER = 4.0

Values = list[torch.Tensor | None]


class WrongValueError(Exception):
    """The message says which result is off, and by how much."""


def outputs_and_gradients(
    function: Callable[..., Any], inputs: Sequence[torch.Tensor], training: bool, seeds: Sequence[torch.Tensor] = ()
) -> Values:
    """All results of a call, then the gradients of the inputs that want one. ``seeds`` are the incoming gradients."""
    with torch.set_grad_enabled(training):
        results = list(function(*inputs))
        if not training:
            return results
        differentiable = [(r, i) for i, r in enumerate(results) if isinstance(r, torch.Tensor) and r.requires_grad]
        wanted = [x for x in inputs if x.requires_grad]
        if not differentiable or not wanted:
            return results
        incoming = [seeds[i].to(r.dtype) if seeds else torch.ones_like(r) for r, i in differentiable]
        found = torch.autograd.grad([r for r, _ in differentiable], wanted, incoming, allow_unused=True)
        return [r.detach() if isinstance(r, torch.Tensor) else None for r in results] + list(found)


class _Wide(torch.fx.Interpreter):
    """Runs a graph in float64: every cast to a floating dtype becomes one to float64, and autocast is left out."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if getattr(target, "__name__", "") in ("_enter_autocast", "_exit_autocast"):
            return None
        return super().call_function(target, _widened(args), _widened(kwargs))

    def call_method(self, target: Any, args: Any, kwargs: Any) -> Any:
        return super().call_method("double" if target in _WIDE else target, _widened(args), _widened(kwargs))


def _widened(value: Any) -> Any:
    if isinstance(value, torch.dtype) and value.is_floating_point:
        return torch.float64
    if isinstance(value, (tuple, list)):
        return type(value)(_widened(v) for v in value)
    return {k: _widened(v) for k, v in value.items()} if isinstance(value, dict) else value


def in_float64(module: torch.fx.GraphModule, inputs: Sequence[torch.Tensor], training: bool) -> Values:
    """The graph's results and gradients in float64."""
    wide = [
        (x.detach().double() if x.is_floating_point() else x).requires_grad_(x.requires_grad and training)
        for x in inputs
    ]
    return outputs_and_gradients(_Wide(module).run, wide, training)


def check(kernel: Values, compiler: Values, exact: Values) -> None:
    """Compares the kernel's values with float64, allowing it the compiler's own error several times over.

    Raises:
        WrongValueError: a result or gradient is missing, not finite where it should be, or too far off.
    """
    for i, (got, beside, want) in enumerate(zip(kernel, compiler, exact, strict=True)):
        if want is None or beside is None or got is None:
            if (got is None) != (beside is None):
                raise WrongValueError(f"result {i} is missing")
            continue
        if got.shape != want.shape or got.dtype != beside.dtype:
            raise WrongValueError(
                f"result {i} is {got.dtype} of shape {tuple(got.shape)}, expected {tuple(want.shape)}"
            )
        allowed = max(_TOLERANCE.get(got.dtype, 0.0), _TIMES_THE_COMPILER * error(beside, want))
        off = error(got, want)
        if not off <= allowed:
            raise WrongValueError(f"result {i} is off by {off:.2g} of its size, allowed is {allowed:.2g}")


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    """The largest difference as a share of the largest value; infinite where one is NaN and the other is not."""
    a, b = got.detach().double(), want.detach().double()
    if not a.numel():
        return 0.0
    finite = torch.isfinite(b)
    if not torch.equal(torch.isnan(a), torch.isnan(b)) and bool((torch.isfinite(a) != finite).any()):
        return float("inf")
    a, b = a[finite], b[finite]
    if not a.numel():
        return 0.0
    if not bool(torch.isfinite(a).all()):
        return float("inf")
    return float((a - b).abs().max() / b.abs().max().clamp_min(1e-12))


def mostly_finite(values: Values) -> bool:
    """True where float64 itself gives numbers to compare with."""
    return all(
        v is None or not v.is_floating_point() or float(torch.isfinite(v).double().mean()) > 0.9
        for v in values
        if v is None or v.numel()
    )
