"""Small models around an op of another library, and what can go wrong in one. Fast: nothing here needs Inductor."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn

import opgraft

library = torch.library.Library("measuretest", "FRAGMENT")
library.define("square(Tensor x) -> Tensor")
library.define("wrong(Tensor x) -> Tensor")
library.define("fatal(Tensor x) -> Tensor")


def _end(x: torch.Tensor) -> torch.Tensor:
    os.abort()


library.impl("square", lambda x: x * x, "CPU")
library.impl("wrong", lambda x: x * x * 1.01, "CPU")
library.impl("fatal", _end, "CPU")
for name in ("square", "wrong", "fatal"):
    torch.library.register_fake(f"measuretest::{name}", torch.empty_like, lib=library)
    torch.library.register_autograd(
        f"measuretest::{name}",
        lambda ctx, grad: 2 * grad * ctx.saved_tensors[0],
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),
        lib=library,
    )


def square(x: torch.Tensor) -> torch.Tensor:
    return x * x


for name in ("square", "wrong", "fatal"):
    opgraft.describe(f"measuretest::{name}", square)


class Model(nn.Module):
    """Linear, op, Linear."""

    def __init__(self, op: Any = torch.ops.measuretest.square) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.op = op
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.op(self.up(x) * 1.1) * 0.9)


def build() -> tuple[nn.Module, tuple[torch.Tensor]]:
    return Model(), (torch.ones(4, 8),)


def build_fatal() -> tuple[nn.Module, tuple[torch.Tensor]]:
    """An op that ends the process when it runs for real."""
    return Model(torch.ops.measuretest.fatal), (torch.ones(4, 8),)


def build_nothing() -> nn.Module:
    return Model()
