"""RMS norm of a sum quantised to float8, where the sum itself is used on as well."""

from __future__ import annotations

from typing import Any

import torch

from opgraft.compile.rules import fp8, norm
from opgraft.compile.rules.rule import Emit, Match, Rule
from opgraft.compile.rules.walk import Node, sum_of_alike


def match(node: Node) -> Match | None:
    quantised = fp8.find(node)
    found = norm.below(quantised.value) if quantised is not None else None
    parts = sum_of_alike(found.x) if found is not None else None
    if quantised is None or found is None or parts is None:
        return None
    quantised.walk.take(found.walk, found.root)
    nodes = quantised.walk.closed(quantised.codes, quantised.scale, found.x)
    if nodes is None:
        return None
    options = (*found.options, quantised.block)

    def write(emit: Emit, x: Any, residual: Any, weight: Any) -> tuple[Node, ...]:
        op = torch.ops.opgraft.add_rms_norm_fp8.default
        return fp8.written(emit, op, quantised, (x, residual, weight, *options))

    return Match((quantised.codes, quantised.scale, found.x), nodes, (*parts, found.weight), write)


RULE = Rule("add-rms-norm-fp8", "opgraft::add_rms_norm_fp8", match, differentiable=False)
