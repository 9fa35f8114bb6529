"""Ops whose fake is missing, says other than the kernel does, or takes sizes for numbers."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.conform.ops.pairs import add, double, double_backward_rule, op

op("no_fake", double, fake=None, backward=double_backward_rule, setup=lambda ctx, inputs, output: None)
add("missing-fake", "no_fake", "good_double")

op(
    "fake_keeps_layout",
    double,
    fake=lambda x: torch.empty_like(x),
    backward=double_backward_rule,
    setup=lambda ctx, inputs, output: None,
)
add("fake-mismatch", "fake_keeps_layout", "good_double")


def _int_fake(x):
    return x.new_empty((int(x.shape[0]), *x.shape[1:]))


op("fake_int", double, fake=_int_fake, backward=double_backward_rule, setup=lambda ctx, inputs, output: None)
add("fake-specializes", "fake_int", "good_double")


def reduced(x: Tensor, mode: int) -> Tensor:
    """Mode 0 keeps the rows, 1 and 2 give a scalar: a number that changes the rank and is no size."""
    torch._check(mode in (0, 1, 2), lambda: f"mode must be 0, 1 or 2, it is {mode}")
    rows = x.contiguous().sum(-1)
    return rows if mode == 0 else rows.mean() if mode == 1 else rows.sum()


op("reduced", reduced, fake=lambda x, mode: x.new_empty(x.shape[:-1] if mode == 0 else ()))
MEAN = {"reduced": (torch.randn(3, 4), 1)}
add("fake-specializes", "fake_int", "reduced", name="fake-specializes: a mode", cases=MEAN)


def positive(x: Tensor) -> Tensor:
    return x[x > 0]


op("positive", positive, fake=lambda x: x.new_empty(torch.library.get_ctx().new_dynamic_size()))
op("positive_fixed", positive, fake=lambda x: x.new_empty(x.numel()))
add("data-dependent-shape", "positive", "good_double", notes=True)
add("data-dependent-shape", "positive_fixed", "positive", name="data-dependent-shape: fixed")
