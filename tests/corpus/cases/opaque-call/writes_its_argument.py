# case: own
"""Scales the gradient-free state of a filter in place with a raw kernel."""
import rawkernels
import torch


@torch.compile(backend="aot_eager")
def advance(state, signal):
    state = state + signal
    rawkernels.scale_(state, 0.9)  # !! opaque-call remedy=register-op
    return state.cumsum(0)


with torch.no_grad():
    state = torch.zeros(5)
    for _ in range(3):
        state = advance(state, torch.randn(5))
print(state)
