# case: S97
"""Fits a potential whose slope is to be smooth; the potential is compiled, and its gradient asked for with its graph."""
import torch
from torch import nn

net = nn.Sequential(nn.Linear(3, 32), nn.Tanh(), nn.Linear(32, 1))
potential = torch.compile(lambda x: net(x).sum(), backend="aot_eager")
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)

for _ in range(3):
    x = torch.randn(16, 3, requires_grad=True)
    (slope,) = torch.autograd.grad(potential(x), x, create_graph=True)  # !! double-backward remedy=compile-inner-gradient
    assert slope.requires_grad
    loss = slope.pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(loss.item())

# !! crashes
