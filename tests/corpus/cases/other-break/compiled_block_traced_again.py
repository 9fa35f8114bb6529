# case: S40
"""Draws the graph of a block for the documentation; the block comes from the serving code, which has compiled it."""
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

block = torch.compile(nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)), backend="aot_eager")


def picture(function, example):
    graph = make_fx(function, tracing_mode="fake")(example)  # !! other-break remedy=torch-hint
    return graph.print_readable(print_output=False)


with torch.no_grad():
    print(block(torch.randn(8, 16)).sum().item())
    print(picture(block, torch.randn(8, 16)))

# !! crashes
# !! not fake-mismatch
# !! not missing-fake
