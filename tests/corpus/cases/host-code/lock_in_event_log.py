# case: own
"""A layer that writes a row of its own event log, under a lock."""
import threading
import torch
from torch import nn


class Events:
    def __init__(self):
        self.lock = threading.Lock()
        self.rows = []

    def emit(self, name, rows):
        with self.lock:  # !! host-code remedy=hoist-host-code
            self.rows.append((name, rows))


EVENTS = Events()


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(8, 8)

    def forward(self, x):
        EVENTS.emit("layer", x.shape[0])
        return self.lin(x).relu()


layer = torch.compile(Layer().eval(), backend="eager")
with torch.no_grad():
    for _ in range(3):
        y = layer(torch.randn(2, 8))
print(y.shape, len(EVENTS.rows))
