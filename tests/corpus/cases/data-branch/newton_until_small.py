# case: own
"""Newton's method for square roots, repeated until the largest change is small."""
import torch


@torch.compile(backend="eager")
def roots(values):
    guess = torch.ones_like(values)
    change = guess
    while change.abs().max() > 1e-5:  # !! data-branch remedy=use-torch-cond,keep-on-device
        change = (values / guess - guess) / 2
        guess = guess + change
    return guess


print(roots(torch.tensor([2.0, 9.0, 16.0])))
