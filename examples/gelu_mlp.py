"""The chapter's model: LayerNorm, Linear, GELU between two scales, Linear, residual, eight times.

    opgraft compare examples/gelu_mlp.py:build
    opgraft compare examples/gelu_mlp.py:small --train

On a CUDA device in bfloat16, elsewhere in float32 and smaller.
"""

from __future__ import annotations

import sys

import torch
from torch import nn

import opgraft
from opgraft.diagnostics import Swap

# The name under which a block looks its activation up, so that an arm can put another implementation in its place.
activation = opgraft.gelu


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.up(self.norm(x))
        h = activation(h * 1.1 + 0.1) * 0.9
        return x + self.down(h)


class GeluMLP(nn.Module):
    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block(width) for _ in range(layers)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(x)


def make(rows: int, width: int, layers: int = 8) -> tuple[nn.Module, tuple[torch.Tensor]]:
    """The model and one batch of ``rows`` rows, on the GPU where there is one."""
    torch.manual_seed(0)
    cuda = torch.cuda.is_available()
    device, dtype = ("cuda", torch.bfloat16) if cuda else ("cpu", torch.float32)
    model = GeluMLP(width, layers).to(device=device, dtype=dtype)
    return model, (torch.randn(rows, width, device=device, dtype=dtype),)


def build() -> tuple[nn.Module, tuple[torch.Tensor]]:
    """The size at which memory traffic counts: 8192 x 2048 on a GPU, 1024 x 256 on a CPU."""
    return make(8192, 2048) if torch.cuda.is_available() else make(1024, 256, layers=2)


def small() -> tuple[nn.Module, tuple[torch.Tensor]]:
    """The size at which launches count: 64 x 1024 on a GPU, 64 x 128 on a CPU."""
    return make(64, 1024) if torch.cuda.is_available() else make(64, 128, layers=2)


def raw() -> Swap:
    """The same kernel bound with pybind11 and not registered: the arm ``raw``. Compiled at first use."""
    import raw_gelu

    return Swap(sys.modules[__name__], "activation", raw_gelu.extension().gelu)
