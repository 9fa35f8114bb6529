# case: own
"""Trains a line with a learning rate that a schedule keeps in a dictionary of options."""
import torch

options = {"rate": 0.1, "names": ["w"]}


@torch.compile(backend="eager")
def update(weight, grad, phase):
    step = grad * 0.1
    if phase == "warm":  # !! recompile remedy=mark-dynamic
        step = step * 0.5
    return weight - step


weight = torch.zeros(3)
for phase in ("warm", "run", "cool", "last"):
    weight = update(weight, torch.ones(3), phase)
print(weight)
