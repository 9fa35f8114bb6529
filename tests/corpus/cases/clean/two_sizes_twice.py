# case: own
"""Two batch sizes, each met twice: the compiler adapts once, and that is all."""
import torch


@torch.compile(backend="eager")
def score(x):
    return (x.sin() * x.cos()).sum(-1)


# !! clean
for rows in (4, 7, 4, 7):
    print(score(torch.randn(rows, 5)).shape)
