# case: S145
"""Saves memory with a selective checkpoint; the policy lies outside of the compiled block, and sees little of it."""
import functools

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

PRECIOUS = {torch.ops.aten.addmm.default, torch.ops.aten.mm.default}


def policy(context, op, *args, **kwargs):
    return CheckpointPolicy.MUST_SAVE if op in PRECIOUS else CheckpointPolicy.PREFER_RECOMPUTE


contexts = functools.partial(create_selective_checkpoint_contexts, policy)
block = torch.compile(nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)))
for _ in range(3):
    x = torch.randn(8, 16, requires_grad=True)
    checkpoint(block, x, use_reentrant=False, context_fn=contexts).sum().backward()
    print(x.grad.norm().item())

# !! clean
