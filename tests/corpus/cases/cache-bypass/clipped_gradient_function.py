# case: S150
"""Starts a training job again and again; its activation has a gradient of its own, written as an autograd.Function."""
import torch
from torch import nn


class Clip(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.clamp(-1, 1)

    @staticmethod
    def backward(ctx, incoming):
        (x,) = ctx.saved_tensors
        return incoming * (x.abs() < 2)


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.mix = nn.Linear(width, width)

    def forward(self, x):
        h = torch.relu(self.mix(x))
        h = Clip.apply(h)  # !! cache-bypass remedy=make-cacheable
        return h.pow(2).mean()


layer = Layer(8)
compiled = torch.compile(layer)
for _ in range(3):
    compiled(torch.randn(4, 8)).backward()
print(layer.mix.weight.grad.norm().item())
