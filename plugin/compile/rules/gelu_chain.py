"""GELU written out as plain torch: an inner polynomial, a curve (tanh, sigmoid, erf), and an outer polynomial.

Shared by the two GELU rules. Casts and views in between are seen through; anything else that is not the formula ends
the match.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from opgraft.compile.metadata import is_static, same_shape, value_of
from opgraft.compile.mutation import written_between
from opgraft.compile.rules.node_kind import CASTS, kind_of
from opgraft.compile.rules.polynomial import NotAPolynomialError, Polynomial, Reader, equal, see_through
from opgraft.compile.rules.rule import Emit, Match, Write

_HIGHEST = 6  # nodes between the curve and the end of the formula


def called(node: torch.fx.Node, form: str, op: Any) -> Match | None:
    """A call of ``F.gelu`` in one of its two forms."""
    given = node.kwargs.get("approximate", node.args[1] if len(node.args) > 1 else "none")
    source = node.args[0] if node.args else node.kwargs.get("input")
    if given != form or not isinstance(source, torch.fx.Node) or value_of(node) is None:
        return None
    return Match((node,), (node,), (source,), _writer(op, None))


def written_out(
    curve: torch.fx.Node, inner: Callable[[torch.fx.Node], Polynomial], *, gated: bool, op: Any
) -> Match | None:
    """The formula around a curve: ``x * curve`` where it is gated, else ``x (1 + curve) / 2``."""
    try:
        return _formula(curve, inner, gated, op)
    except NotAPolynomialError:
        return None


def _formula(curve: torch.fx.Node, inner: Callable[[torch.fx.Node], Polynomial], gated: bool, op: Any) -> Match | None:
    for x in _operands_below(curve.args[0]):
        reader = Reader(x)
        if not equal(reader.read(curve.args[0]), inner(x)):
            continue
        product = tuple(sorted((x, curve), key=lambda n: n.name))
        whole: Polynomial = {product: 1.0} if gated else {(x,): 0.5, product: 0.5}
        for root in _only_users_above(curve):
            outer = Reader(x, curve)
            if equal(outer.read(root), whole):
                return _close(x, root, {curve, root, *reader.covered, *outer.covered}, op)
    return None


def _close(x: torch.fx.Node, root: torch.fx.Node, nodes: set[torch.fx.Node], op: Any) -> Match | None:
    """The match, where nothing else reads what is between and nothing writes meanwhile."""
    users = list(root.users)
    back = users[0] if len(users) == 1 and kind_of(users[0]) in CASTS else None
    source = _source(x)
    if back is not None and value_of(back).dtype == value_of(source).dtype != value_of(root).dtype:
        root, x = back, source  # computed wide and cast back: the op computes wide inside
        nodes = {*nodes, root}
    order = tuple(n for n in root.graph.nodes if n in nodes)
    if written_between(order):
        return None
    for node in order:
        if node is not root and see_through(node) is None and not nodes.issuperset(node.users):
            return None
    before, after = value_of(x), value_of(root)
    if not same_shape(before, after) and not (is_static(before) and is_static(after)):
        return None
    shape = None if same_shape(before, after) else [int(s) for s in after.shape]
    return Match((root,), order, (x,), _writer(op, None if after.dtype == before.dtype else after.dtype, shape))


def _writer(op: Any, dtype: torch.dtype | None, shape: list[int] | None = None) -> Write:
    def write(emit: Emit, x: torch.fx.Node) -> tuple[torch.fx.Node, ...]:
        if dtype is not None:
            x = emit(torch.ops.aten._to_copy.default, x, dtype=dtype)
        y = emit(op, x)
        return (y if shape is None else emit(torch.ops.aten.reshape.default, y, shape),)

    return write


def _source(node: torch.fx.Node) -> torch.fx.Node:
    """What widening casts and order-keeping views are of."""
    while (inner := see_through(node)) is not None:
        node = inner
    return node


def _operands_below(node: object) -> Iterator[torch.fx.Node]:
    """What the argument of the curve is made of, nearest first: one of them is the variable."""
    waiting: list[object] = [node]
    seen: set[torch.fx.Node] = set()
    while waiting and len(seen) < 24:
        head = waiting.pop(0)
        if isinstance(head, torch.fx.Node) and head not in seen:
            seen.add(head)
            yield head
            waiting.extend(head.args)


def _only_users_above(node: torch.fx.Node) -> Iterator[torch.fx.Node]:
    for _ in range(_HIGHEST):
        if len(node.users) != 1:
            return
        node = next(iter(node.users))
        yield node
