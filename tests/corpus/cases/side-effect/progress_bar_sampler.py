# case: own
"""A sampler that shows its progress while it is compiled whole."""
import torch
from torch import nn
from tqdm import tqdm


class Sampler(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(8, 8)

    def forward(self, x):
        bar = tqdm(total=4, disable=True)  # !! side-effect remedy=hoist-host-code
        y = self.net(x).tanh()
        return y


sampler = torch.compile(Sampler().eval(), backend="eager")
with torch.no_grad():
    for _ in range(2):
        y = sampler(torch.randn(2, 8))
print(y.shape)
