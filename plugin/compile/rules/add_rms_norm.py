"""RMS norm of a sum, such as a residual and a layer's result, where the sum itself is used on as well."""

from __future__ import annotations

import operator
from typing import Any

import torch

from opgraft.compile.rules import norm
from opgraft.compile.rules.rule import Emit, Match, Rule
from opgraft.compile.rules.walk import Node, sum_of_alike


def match(node: Node) -> Match | None:
    found = norm.find(node)
    parts = sum_of_alike(found.x) if found is not None else None
    if found is None or parts is None:
        return None
    nodes = found.walk.closed(found.root, found.x)
    if nodes is None:
        return None
    options = found.options

    def write(emit: Emit, x: Any, residual: Any, weight: Any) -> tuple[Node, ...]:
        both = emit(torch.ops.opgraft.add_rms_norm.default, x, residual, weight, *options)
        return emit(operator.getitem, both, 0), emit(operator.getitem, both, 1)

    return Match((found.root, found.x), nodes, (*parts, found.weight), write)


RULE = Rule("add-rms-norm", "opgraft::add_rms_norm", match)
