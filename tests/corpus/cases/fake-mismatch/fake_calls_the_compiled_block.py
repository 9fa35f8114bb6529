# case: S40
"""Serves a block as one operator; its fake asks the compiled block itself for the shape."""
import torch
from torch import nn

layers = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)).requires_grad_(False)
compiled_layers = torch.compile(layers, backend="aot_eager")


@torch.library.custom_op("demo_serving::block", mutates_args=())
def block(x: torch.Tensor) -> torch.Tensor:
    return compiled_layers(x)


@block.register_fake
def _(x):
    return compiled_layers(x)


model = torch.compile(lambda x: block(x) * 2, backend="aot_eager")  # !! fake-mismatch remedy=fix-fake
for _ in range(3):
    print(model(torch.randn(8, 16)).sum().item())

# !! crashes
