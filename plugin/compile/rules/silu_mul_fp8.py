"""A SiLU gate quantised to float8: silu(gate) * up, with a scale a row or a block of 128."""

from __future__ import annotations

from typing import Any

import torch

from opgraft.compile.rules import fp8
from opgraft.compile.rules.node_kind import kind_of
from opgraft.compile.rules.rule import Emit, Match, Rule
from opgraft.compile.rules.walk import Node, both_orders, like


def match(node: Node) -> Match | None:
    found = fp8.find(node)
    if found is None or kind_of(found.value) != "mul":
        return None
    walk = found.walk
    for left, right in both_orders(found.value):
        curve = walk.through_casts(left)
        if kind_of(curve) != "silu":
            continue
        gate, up = walk.through_casts(curve.args[0]), walk.through_casts(right)
        if not like(gate, up):
            gate, up = curve.args[0], right
        if not like(gate, up) or not isinstance(up, Node):
            continue
        walk.nodes |= {found.value, curve}
        nodes = walk.closed(found.codes, found.scale)
        if nodes is None:
            return None

        def write(emit: Emit, gate: Any, up: Any) -> tuple[Node, ...]:
            return fp8.written(emit, torch.ops.opgraft.silu_mul_fp8.default, found, (gate, up, found.block))[:2]

        return Match((found.codes, found.scale), nodes, (gate, up), write)
    return None


RULE = Rule("silu-mul-fp8", "opgraft::silu_mul_fp8", match, differentiable=False)
