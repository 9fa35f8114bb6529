# case: own
"""Mixes class probabilities of two heads after a sanity check on their sum."""
import torch
from torch import nn


class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, x):
        mixed = (self.left(x).softmax(-1) + self.right(x).softmax(-1)) / 2
        if (mixed.sum(-1) - 1).abs().max() > 1e-3:  # !! data-branch remedy=use-torch-cond,keep-on-device
            mixed = mixed / mixed.sum(-1, keepdim=True)
        return mixed.log()


print(torch.compile(Mixture().eval(), backend="aot_eager")(torch.randn(3, 8)).shape)
