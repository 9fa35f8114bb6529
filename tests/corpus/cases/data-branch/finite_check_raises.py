# case: own
"""A loss that refuses what is not finite."""
import torch


@torch.compile(backend="eager")
def loss(x, y):
    error = (x - y).square().mean()
    if torch.isnan(error):  # !! data-branch remedy=keep-on-device
        raise ArithmeticError("the loss is not a number")
    return error * 0.5


for _ in range(3):
    value = loss(torch.randn(4), torch.randn(4))
print(value)
