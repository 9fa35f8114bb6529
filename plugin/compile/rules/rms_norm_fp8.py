"""RMS norm quantised to float8, with a scale a row or a block of 128."""

from __future__ import annotations

from typing import Any

import torch

from opgraft.compile.rules import fp8, norm
from opgraft.compile.rules.rule import Emit, Match, Rule
from opgraft.compile.rules.walk import Node


def match(node: Node) -> Match | None:
    quantised = fp8.find(node)
    found = norm.below(quantised.value) if quantised is not None else None
    if quantised is None or found is None:
        return None
    quantised.walk.take(found.walk, found.root)
    nodes = quantised.walk.closed(quantised.codes, quantised.scale)
    if nodes is None:
        return None
    options = (*found.options, quantised.block)

    def write(emit: Emit, x: Any, weight: Any) -> tuple[Node, ...]:
        return fp8.written(emit, torch.ops.opgraft.rms_norm_fp8.default, quantised, (x, weight, *options))[:2]

    return Match((quantised.codes, quantised.scale), nodes, (found.x, found.weight), write)


RULE = Rule("rms-norm-fp8", "opgraft::rms_norm_fp8", match, differentiable=False)
