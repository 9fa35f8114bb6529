"""A small transformer with the op in its MLPs: the model of ``make demo``, and a target for ``opgraft compare``.

opgraft compare examples/transformer_block.py:build
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

import opgraft

# The name under which the MLP looks its activation up, so that an arm can put another implementation in its place.
activation = opgraft.gelu


class Attention(nn.Module):
    """Causal self-attention over (batch, tokens, width)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.inward = nn.Linear(width, 3 * width, bias=False)
        self.outward = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, width = x.shape
        q, k, v = (
            part.view(batch, tokens, self.heads, width // self.heads).transpose(1, 2)
            for part in self.inward(x).chunk(3, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.outward(mixed.transpose(1, 2).reshape(batch, tokens, width))


class MLP(nn.Module):
    """Up, activation, down. The scale before the activation and the gain after it are neighbours that a compiler
    fuses with an activation it can look into."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.scale = nn.Parameter(torch.ones(4 * width))
        self.gain = nn.Parameter(torch.ones(4 * width))
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.up(x) * self.scale
        hidden = activation(hidden)
        return self.down(hidden * self.gain)


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.attention = Attention(width, heads)
        self.mlp = MLP(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norms[0](x))
        return x + self.mlp(self.norms[1](x))


class Transformer(nn.Module):
    def __init__(self, layers: int, width: int, heads: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def build(device: str | None = None) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """The model and its inputs: bfloat16 and large on a GPU, float32 and small on a CPU."""
    chosen = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    generator = torch.Generator().manual_seed(0)
    layers, width, heads, batch, tokens = (8, 2048, 16, 8, 1024) if chosen.type == "cuda" else (2, 256, 4, 8, 128)
    dtype = torch.bfloat16 if chosen.type == "cuda" else torch.float32
    model = Transformer(layers, width, heads)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * parameter.shape[1] ** -0.5)
    x = torch.randn(batch, tokens, width, generator=generator)
    return model.to(chosen, dtype).eval(), (x.to(chosen, dtype),)
