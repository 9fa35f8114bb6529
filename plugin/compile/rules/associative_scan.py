"""The recurrence h[t] = a[t] h[t-1] + b[t] as ``associative_scan`` over pairs.

Two forms arrive: the higher-order op with the combining function as a graph, and the same op taken apart by Dynamo into
slices, products and interleavings (``combine_mode="generic"``). The first is compared as polynomials. The second is run
in float64 on a small stand-in and compared with the recurrence: what consists of products, sums and moves alone is a
polynomial of its inputs, and two polynomials that agree at random points are equal (Schwartz 1980).
"""

from __future__ import annotations

from typing import Any

import torch

from opgraft.compile.metadata import is_static
from opgraft.compile.rules.node_kind import kind_of
from opgraft.compile.rules.polynomial import NotAPolynomialError, Reader, equal
from opgraft.compile.rules.rule import Emit, Match, Rule
from opgraft.compile.rules.walk import Node, dead_from, like, tensor_of


def match(node: Node) -> Match | None:
    """Asked at the node that takes the states out of the higher-order op's results."""
    if kind_of(node) != "getitem" or node.args[1] != 1 or not isinstance(node.args[0], Node):
        return None
    scan = node.args[0]
    if getattr(scan.target, "__name__", "") != "associative_scan" or len(scan.args) < 2 or scan.kwargs:
        return None
    combine, pairs = scan.args[0], scan.args[1]
    if not isinstance(pairs, (list, tuple)) or len(pairs) != 2 or (len(scan.args) > 2 and scan.args[2]):
        return None
    decay, update = pairs
    if not isinstance(combine, Node) or not like(decay, update) or not _is_recurrence(node, combine):
        return None
    # The products of decays, the other result, must not be wanted.
    nodes = {scan, node}
    for user in scan.users:
        nodes |= {user} if user is node else dead_from(user) or {combine}
    if combine in nodes:
        return None
    nodes |= {combine} if set(combine.users) == {scan} else set()
    place = _place_of_time(node)

    def write(emit: Emit, decay: Any, update: Any) -> tuple[Node, ...]:
        # The higher-order op always scans dimension 0, which callers put there by a view. The op wants dense tensors.
        if place:
            decay, update = (emit(torch.ops.aten.movedim.int, t, 0, place) for t in (decay, update))
        states = emit(torch.ops.opgraft.linear_scan.default, decay, update, None, place, False)
        return (emit(torch.ops.aten.movedim.int, states, place, 0) if place else states,)

    return Match((node,), tuple(sorted(nodes)), (decay, update), write)


def _place_of_time(node: Node) -> int:
    """Where dimension 0 lies in memory: before which dimension the states are dense."""
    value = tensor_of(node)
    if value is None or not is_static(value):
        return 0
    return next((k for k in range(value.dim()) if value.movedim(0, k).is_contiguous()), 0)


def _is_recurrence(node: Node, combine: Any) -> bool:
    """True where the graph maps (a, b), (c, d) to (a c, c b + d)."""
    module = node.graph.owning_module
    inner = getattr(module, str(combine.target), None) if isinstance(combine, Node) and module is not None else None
    if not isinstance(inner, torch.fx.GraphModule):
        return False
    inputs = inner.graph.find_nodes(op="placeholder")
    (output,) = inner.graph.find_nodes(op="output")
    results = output.args[0]
    if len(inputs) != 4 or not isinstance(results, (list, tuple)) or len(results) != 2:
        return False
    a, b, c, d = inputs
    reader = Reader(*inputs)

    def product(left: Node, right: Node) -> tuple[Node, ...]:
        return tuple(sorted((left, right), key=lambda n: n.name))

    try:
        return equal(reader.read(results[0]), {product(a, c): 1.0}) and equal(
            reader.read(results[1]), {product(c, b): 1.0, (d,): 1.0}
        )
    except NotAPolynomialError:
        return False


RULE = Rule("associative-scan", "opgraft::linear_scan", match)
