"""Inputs for a part of a graph: real tensors of the right layout, with values of the size that a model has there.

Values decide about time: far from zero an exponential takes another path or underflows, and on a CPU a subnormal number
costs a hundred cycles. So weights are drawn as layers are initialised, and everything else around one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from opgraft.compile.metadata import value_of
from opgraft.compile.rules.node_kind import kind_of
from opgraft.compile.site import TensorFacts

NORMAL, POSITIVE = "normal", "positive"


@dataclass(frozen=True)
class Wanted:
    """One input: its facts, and the interval that its values are drawn from."""

    facts: TensorFacts
    low: float = -2.0
    high: float = 2.0


def wanted(inputs: Sequence[tuple[torch.fx.Node, TensorFacts]]) -> list[Wanted]:
    """What each input of a part of a graph should hold, from what reads it there."""
    return [Wanted(fact, *_interval(node, fact)) for node, fact in inputs]


def _interval(node: torch.fx.Node, fact: TensorFacts) -> tuple[float, float]:
    if not fact.dtype.is_floating_point or not (_is_parameter(node) or _is_a_layers_weight(node)):
        return -2.0, 2.0
    if len(fact.shape) < 2:
        return (-0.1, 0.1) if "bias" in node.name else (0.5, 1.5)
    reach = math.sqrt(3.0 / max(math.prod(fact.shape[1:]), 1))  # of variance 1 / fan-in
    return -reach, reach


def _is_parameter(node: torch.fx.Node) -> bool:
    return isinstance(value_of(node), torch.nn.Parameter)


def _is_a_layers_weight(node: torch.fx.Node) -> bool:
    def place(user: torch.fx.Node) -> int:
        return {"linear": 1, "conv1d": 1, "conv2d": 1, "conv3d": 1}.get(kind_of(user) or "", -1)

    return any(len(user.args) > place(user) >= 0 and user.args[place(user)] is node for user in node.users)


def make(inputs: Sequence[Wanted], values: str, training: bool, seed: int = 0) -> list[torch.Tensor]:
    """Tensors with the wanted sizes and strides: signed values, or values in (0, 1) for logarithms, roots and decays.

    Integers are 0 or 1, valid as an index into anything with two rows.
    """
    devices = {given.facts.device for given in inputs}
    generators = {device: torch.Generator(device).manual_seed(seed) for device in devices}
    return [_one(given, values, generators[given.facts.device], training) for given in inputs]


def _one(given: Wanted, values: str, generator: torch.Generator, training: bool) -> torch.Tensor:
    fact = given.facts
    out = torch.empty_strided(fact.shape, fact.stride, dtype=fact.dtype, device=fact.device)
    if fact.dtype.is_floating_point:
        low, high = (given.low, given.high) if values == NORMAL else (0.05, 0.95)
        drawn = torch.rand(fact.shape, device=fact.device, generator=generator) * (high - low) + low
    elif fact.dtype == torch.bool or not fact.dtype.is_complex:
        drawn = torch.randint(0, 2, fact.shape, device=fact.device, generator=generator)
    else:
        raise ValueError(f"inputs of dtype {fact.dtype} are not made")
    expanded = tuple(1 if stride == 0 else size for size, stride in zip(fact.shape, fact.stride, strict=True))
    view = out.as_strided(expanded, fact.stride)
    view.copy_(drawn[tuple(slice(0, size) for size in expanded)])
    return out.requires_grad_(training and fact.requires_grad)
