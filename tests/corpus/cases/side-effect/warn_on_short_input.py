# case: own
"""A smoothing filter that tells its user when the input is shorter than its window."""
import warnings

import torch


@torch.compile(backend="eager")
def smooth(x, window: int = 5):
    x = torch.nn.functional.pad(x, (window, window))
    if x.shape[-1] < 20:
        warnings.warn("the input is short")  # !! side-effect remedy=hoist-host-code,reorder-logging
    return x.unfold(-1, window, 1).mean(-1)


print(smooth(torch.randn(6)).shape)
