"""Puts one candidate at a site of a graph: the op's node for an idiom, the reference's nodes for an op."""

from __future__ import annotations

from typing import Any

import torch

from opgraft.compile.metadata import same_shape, value_of
from opgraft.compile.reference import copied_meta
from opgraft.compile.site import Site


def put_kernel(site: Site, *, erase: bool = True) -> torch.fx.Node:
    """Replaces an idiom by a call of the op; gives the node that now has the value."""
    graph, root = site.root.graph, site.root
    result = value_of(root)
    args = list(site.args)
    with graph.inserting_before(root):
        if site.cast is not None:
            args[0] = _new(graph, root, torch.ops.aten._to_copy.default, (args[0],), {"dtype": site.cast})
        # The op's layout tag is its own, and the arguments in the user's layout are recorded when this graph is traced.
        found = _new(graph, root, site.spec.op, tuple(args), dict(site.kwargs))
        source = value_of(site.args[0])
        if not same_shape(source, result):  # the idiom looked through views; both shapes are numbers then
            found = _new(graph, root, torch.ops.aten.reshape.default, (found, [int(s) for s in result.shape]), {})
    found.meta["example_value"] = result
    root.replace_all_uses_with(found)
    for node in reversed(site.nodes):
        if erase and not node.users:
            graph.erase_node(node)
    return found


def _new(graph: torch.fx.Graph, root: torch.fx.Node, target: Any, args: Any, kwargs: Any) -> torch.fx.Node:
    node = graph.call_function(target, args, kwargs)
    node.meta = copied_meta(root)
    return node
