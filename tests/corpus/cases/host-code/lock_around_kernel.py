# case: own
"""A cached rotation table, guarded by a lock because several threads serve requests."""
import threading

import torch
from torch import nn

_lock = threading.Lock()


class Rotate(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.randn(8, 8))

    def forward(self, x):
        x = x.tanh()
        _lock.acquire()  # !! host-code remedy=hoist-host-code
        y = x @ self.table
        return y.relu()


print(torch.compile(Rotate().eval(), backend="eager")(torch.randn(2, 8)).shape)
_lock.release()
