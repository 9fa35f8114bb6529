# case: S114
"""Routes tokens through an expert block that its author compiled, and then wrapped as one operator."""
import torch
from torch import nn

experts = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
fused_experts = torch.compile(experts, backend="aot_eager")


@torch.library.custom_op("demo_moe::experts", mutates_args=())
def run_experts(x: torch.Tensor) -> torch.Tensor:
    return fused_experts(x)


@run_experts.register_fake
def _(x):
    return x.new_empty(x.shape)


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.project = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x):
        return x + run_experts(self.project(self.norm(x)))  # !! library-jit remedy=warm-up-first


model = torch.compile(Block(16), backend="aot_eager")
with torch.no_grad():
    for _ in range(4):
        print(model(torch.randn(8, 16)).sum().item())
