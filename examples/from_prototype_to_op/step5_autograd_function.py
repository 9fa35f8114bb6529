"""Step 5, a manual ``autograd.Function``: the gradient by hand, proved by ``gradcheck`` in float64.

Shows: the older way to give step 3's kernel a gradient, and why its test must run in float64. gradcheck compares the
formula with (f(x + eps) - f(x - eps)) / 2 eps at eps = 1e-6. In float32 the values of f near 4 are 5e-7 apart, so
the quotient alone is wrong by up to 0.1: the right formula fails. Loosening the tolerance until it passes lets a
wrong formula pass as well.
Run:    python examples/from_prototype_to_op/step5_autograd_function.py
Expect: float64: right formula passes, wrong formula fails. float32: the right one fails, with an error in the finite
        difference 100 000 times the formula's own; at atol=0.3 it passes, and so does the wrong one.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from reference import check, expected_gradient, sample
from step3_extension import extension
from torch.autograd import gradcheck
from torch.autograd.function import once_differentiable

_kernel = extension()
CUBIC = 0.044715
TWO_SQRT_2_OVER_PI = 1.5957691216057308


class Gelu(torch.autograd.Function):
    """Forward and backward are kernels. once_differentiable: a second derivative is an error and not a wrong number."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return _kernel.gelu(x)  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return _kernel.gelu_backward(grad, x)  # type: ignore[no-any-return]


class GeluWrongGradient(Gelu):
    """The same with the factor 3 of d/dx x^3 forgotten: wrong by up to 0.03."""

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        s = torch.sigmoid(TWO_SQRT_2_OVER_PI * (x + CUBIC * x**3))
        slope: torch.Tensor = s + x * s * (1 - s) * TWO_SQRT_2_OVER_PI * (1 + CUBIC * x * x)
        return grad * slope


def gelu(x: torch.Tensor) -> torch.Tensor:
    """GELU with a gradient."""
    return Gelu.apply(x)  # type: ignore[no-any-return, no-untyped-call]


def passes(function: type[torch.autograd.Function], x: torch.Tensor, atol: float = 1e-5) -> bool:
    """Whether gradcheck accepts the formula at ``x``."""
    with warnings.catch_warnings():
        # gradcheck's own warning that the input is not in double precision.
        warnings.simplefilter("ignore", UserWarning)
        return gradcheck(function.apply, (x.detach().requires_grad_(),), raise_exception=False, atol=atol)


def finite_difference(x: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """What gradcheck compares with, in the precision of ``x``."""
    quotient: torch.Tensor = (_kernel.gelu(x + eps) - _kernel.gelu(x - eps)) / (2 * eps)
    return quotient


def main() -> None:
    x = torch.linspace(-4, 4, 32, dtype=torch.float64, device=sample(1).device if _kernel.has_cuda else "cpu")
    check("step 5, autograd.Function", gelu(x), x)

    def both(x: torch.Tensor, atol: float = 1e-5) -> tuple[bool, bool]:
        return passes(Gelu, x, atol), passes(GeluWrongGradient, x, atol)

    words = {True: "passes", False: "fails"}

    def show(what: str, outcome: tuple[bool, bool]) -> None:
        print(f"{what:<24} right formula {words[outcome[0]]}, wrong formula {words[outcome[1]]}")

    single = x.float()
    in_double, in_single, loosened = both(x), both(single), both(single, atol=0.3)
    show("gradcheck in float64:", in_double)
    show("gradcheck in float32:", in_single)
    show("float32, atol=0.3:", loosened)

    right = expected_gradient(x)
    by_formula = _kernel.gelu_backward(torch.ones_like(single), single)
    for what, value in (
        ("float32 formula", by_formula),
        ("float32 finite difference", finite_difference(single)),
        ("float64 finite difference", finite_difference(x)),
    ):
        print(f"error of the {what}: {(value.double() - right).abs().max().item():.1e}")

    assert in_double == (True, False)
    assert in_single[0] is False
    assert loosened == (True, True)


if __name__ == "__main__":
    main()
