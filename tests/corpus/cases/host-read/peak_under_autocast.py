# case: S137
"""Mixed-precision block that logs a statistic of its activations while autocast is on."""
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def inner(self, x):
        h = self.up(x)
        self.peak = h.abs().max().item()  # !! host-read remedy=keep-on-device
        return self.down(torch.relu(h))

    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = self.inner(x)
        return y.float() + x


model = torch.compile(Block(16), backend="aot_eager")
for _ in range(4):
    print(model(torch.randn(4, 16)).mean().item(), model.peak)
