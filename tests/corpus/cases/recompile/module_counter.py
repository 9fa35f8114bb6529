# case: own
"""A layer that names its steps: the name is a new string at every call."""
import torch
from torch import nn


class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.line = nn.Linear(4, 4)
        self.label = "start"

    def forward(self, x):
        y = self.line(x)
        if self.label != "never":  # !! recompile remedy=mark-dynamic
            y = y.relu()
        return y


layer = Named().eval()
step = torch.compile(layer, backend="eager")
with torch.no_grad():
    for number in range(5):
        layer.label = f"step {number}"
        y = step(torch.randn(2, 4))
print(y.shape)
