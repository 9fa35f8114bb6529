# case: S38
"""A rotary embedding from an extension package whose kernels are registered for every backend at once."""
import torch
from torch import nn

import rawkernels

library = torch.library.Library("demo_rotary", "DEF")
library.define("turn(Tensor x, float factor) -> Tensor")


def turn(x, factor):
    return rawkernels.scale(x.contiguous(), factor)


library.impl("turn", turn, "CompositeImplicitAutograd")


class Attention(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.query = nn.Linear(width, width)

    def forward(self, x):
        return torch.ops.demo_rotary.turn(self.query(x), 0.5) + x  # !! composite-kernel remedy=register-per-backend


model = torch.compile(Attention(16), backend="aot_eager")
with torch.no_grad():
    for _ in range(3):
        print(model(torch.randn(4, 16)).sum().item())

# !! crashes
