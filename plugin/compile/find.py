"""Every site of a graph."""

from __future__ import annotations

from typing import Any

import torch
from torch._ops import OpOverload, OpOverloadPacket

from opgraft import registry
from opgraft.compile import rules
from opgraft.compile.metadata import is_plain, is_static, same_shape, same_strides, value_of
from opgraft.compile.site import Site


def overload_of(target: Any) -> OpOverload | None:
    """The overload that a node calls, where that is certain."""
    if isinstance(target, OpOverload):
        return target
    if isinstance(target, OpOverloadPacket) and target.overloads() == ["default"]:
        found: OpOverload = target.default
        return found
    return None


def find_sites(graph: torch.fx.Graph) -> list[Site]:
    """Calls of registered ops and idioms, in the graph's order. Ops that write to their arguments are left alone."""
    found = []
    for node in graph.nodes:
        op = overload_of(node.target) if node.op == "call_function" else None
        spec = registry.find(op) if op is not None else None
        if spec is not None and not spec.op._schema.is_mutable:
            found.append(Site(spec, node, (node,), tuple(node.args), dict(node.kwargs)))
    for rule, match in rules.matches(graph):
        spec = registry.find(rule.op)
        if spec is not None and _can_serve(spec, match):
            found.append(Site(spec, match.root, match.nodes, match.args, {}, rule.name, match.cast))
    order = {node: i for i, node in enumerate(graph.nodes)}
    return sorted(found, key=lambda site: order[site.root])


def _can_serve(spec: registry.OpSpec, match: rules.Match) -> bool:
    """True where the op takes this dtype and gives the layout that the rest of the graph was traced with."""
    result = value_of(match.root)
    if not is_plain(result) or result.dtype not in spec.dtypes:
        return False
    if any(isinstance(a, torch.fx.Node) and not is_plain(value_of(a)) for a in match.args):
        return False
    source = value_of(match.args[0])
    if not same_shape(source, result) and not (is_static(source) and is_static(result)):
        return False
    return same_strides(result, result.new_empty(result.shape))
