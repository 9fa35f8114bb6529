"""Inputs for a neighbourhood: real tensors of the right layout, with values that keep most formulas finite."""

from __future__ import annotations

import torch

from opgraft.compile.site import TensorFacts

NORMAL, POSITIVE = "normal", "positive"


def make(facts: list[TensorFacts], values: str, training: bool) -> list[torch.Tensor]:
    """Tensors with the given sizes and strides: signed values, or values in (0, 1) for logarithms, roots and decays.

    Integers are 0 or 1, valid as an index into anything with two rows.
    """
    devices = {fact.device for fact in facts}
    generators = {device: torch.Generator(device).manual_seed(0) for device in devices}
    return [_one(fact, values, generators[fact.device], training) for fact in facts]


def _one(fact: TensorFacts, values: str, generator: torch.Generator, training: bool) -> torch.Tensor:
    out = torch.empty_strided(fact.shape, fact.stride, dtype=fact.dtype, device=fact.device)
    if fact.dtype.is_floating_point:
        low, high = (-2.0, 2.0) if values == NORMAL else (0.05, 0.95)
        drawn = torch.rand(fact.shape, device=fact.device, generator=generator) * (high - low) + low
    elif fact.dtype == torch.bool or not fact.dtype.is_complex:
        drawn = torch.randint(0, 2, fact.shape, device=fact.device, generator=generator)
    else:
        raise ValueError(f"inputs of dtype {fact.dtype} are not made")
    expanded = tuple(1 if stride == 0 else size for size, stride in zip(fact.shape, fact.stride, strict=True))
    view = out.as_strided(expanded, fact.stride)
    view.copy_(drawn[tuple(slice(0, size) for size in expanded)])
    return out.requires_grad_(training and fact.requires_grad)
