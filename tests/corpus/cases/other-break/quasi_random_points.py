# case: S16
"""Trains a network to integrate: the points of each step come from torch's own quasi-random generator."""
import torch
from torch import nn


class Integrator(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(width, 32), nn.Tanh(), nn.Linear(32, 1))
        self.points = torch.quasirandom.SobolEngine(width, scramble=True, seed=0)

    def forward(self, centre):
        points = self.points.draw(64)  # !! other-break remedy=torch-hint
        return self.net(points + centre).mean()


# !! not opaque-call
# !! not host-code
model = torch.compile(Integrator(4), backend="aot_eager")
for _ in range(3):
    model(torch.randn(4)).backward()
print(model.net[0].weight.grad.norm().item())
