# case: own
"""Adds noise whose strength follows the time of day."""
import time

import torch


@torch.compile(backend="eager")
def shake(x):
    x = x.cos()
    strength = time.monotonic() % 1  # !! host-code remedy=hoist-host-code
    return x * strength


print(shake(torch.randn(4)).shape)
