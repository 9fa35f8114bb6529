"""What every step computes, the inputs it is tried on, and the check that all steps share.

GELU in tanh form (Hendrycks and Gimpel, https://arxiv.org/abs/1606.08415):
gelu(x) = x (1 + tanh u) / 2 with u = sqrt(2/pi) (x + 0.044715 x^3). The kernels use (1 + tanh u) / 2 = logistic(2u),
one exponential and one division an element. Expected values are torch's own, in float64.
"""

from __future__ import annotations

import sys
from typing import NoReturn

import torch
import torch.nn.functional as F


def gelu(x: torch.Tensor) -> torch.Tensor:
    """The op in plain torch: any shape, any floating dtype."""
    return F.gelu(x, approximate="tanh")


def device() -> torch.device:
    """The GPU where torch has one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def sample(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Values spread over [-6, 6] in a fixed random order, on :func:`device`."""
    count = int(torch.Size(shape).numel())
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0))
    return torch.linspace(-6, 6, count, dtype=torch.float64)[order].reshape(shape).to(dtype).to(device())


def expected(x: torch.Tensor) -> torch.Tensor:
    """The right answer for ``x``, computed in float64 and rounded once to the dtype of ``x``."""
    return gelu(x.detach().double()).to(x.dtype)


def expected_gradient(x: torch.Tensor) -> torch.Tensor:
    """The right derivative at ``x`` for an incoming gradient of ones, computed in float64."""
    leaf = x.detach().double().requires_grad_()
    (gradient,) = torch.autograd.grad(gelu(leaf).sum(), leaf)
    return gradient.to(x.dtype)


def check(what: str, actual: torch.Tensor, x: torch.Tensor) -> None:
    """Prints the largest error of ``actual`` against float64; raises AssertionError where it is more than rounding."""
    right = expected(x)
    error = (actual.double() - right.double()).abs().max().item() if x.numel() else 0.0
    torch.testing.assert_close(actual, right, msg=lambda detail: f"{what} computes something else: {detail}")
    print(f"{what}: {str(x.dtype).removeprefix('torch.')} {tuple(x.shape)} on {x.device}, max error {error:.1e}")


def unavailable(sentence: str) -> NoReturn:
    """Says what this machine lacks and ends the step: nothing failed, so the exit code is 0."""
    print(sentence)
    sys.exit(0)
