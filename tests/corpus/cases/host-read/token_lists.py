# case: own
"""Greedy decoding that collects the chosen words in a Python list."""
import torch
from torch import nn

head = nn.Linear(16, 30)
rows = nn.Embedding(30, 16)


@torch.compile(backend="eager")
def choose(state, chosen):
    best = head(state).argmax(-1)
    chosen.extend(best.tolist())  # !! host-read remedy=keep-on-device
    return state + rows(best)


words = []
with torch.no_grad():
    state = torch.randn(3, 16)
    for _ in range(3):
        state = choose(state, words)
print(len(words))
