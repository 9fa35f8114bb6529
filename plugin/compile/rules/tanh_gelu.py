"""GELU in its tanh form: the call ``F.gelu(x, approximate="tanh")``, and the formula written out.

Written out it is x (1 + tanh(c (x + 0.044715 x^3))) / 2 with c = sqrt(2/pi), or the same by a sigmoid, in any order of
factors and with casts and views in between. The erf form is another function and never matches.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from opgraft.compile.metadata import value_of
from opgraft.compile.mutation import written_between
from opgraft.compile.rules.node_kind import CASTS, kind_of
from opgraft.compile.rules.polynomial import NotAPolynomialError, Polynomial, Reader, equal, see_through
from opgraft.compile.rules.rule import Match, Rule

_C = math.sqrt(2.0 / math.pi)
_CUBIC = 0.044715
_HIGHEST = 6  # nodes between the tanh and the end of the formula


def match(node: torch.fx.Node) -> Match | None:
    kind = kind_of(node)
    if kind == "gelu":
        called = node.kwargs.get("approximate", node.args[1] if len(node.args) > 1 else "none") == "tanh"
        source = node.args[0] if node.args else node.kwargs.get("input")
        plain = called and isinstance(source, torch.fx.Node) and value_of(node) is not None
        return Match(node, (node,), (source,)) if plain else None
    if kind not in ("tanh", "sigmoid") or len(node.args) != 1:
        return None
    try:
        return _written_out(node, scale=1.0 if kind == "tanh" else 2.0)
    except NotAPolynomialError:
        return None


def _written_out(curve: torch.fx.Node, scale: float) -> Match | None:
    for x in _operands_below(curve.args[0]):
        inner = Reader(x)
        wanted: Polynomial = {(x,): scale * _C, (x, x, x): scale * _C * _CUBIC}
        if not equal(inner.read(curve.args[0]), wanted):
            continue
        product = tuple(sorted((x, curve), key=lambda n: n.name))
        whole: Polynomial = {(x,): 0.5, product: 0.5} if scale == 1.0 else {product: 1.0}
        for root in _only_users_above(curve):
            outer = Reader(x, curve)
            if equal(outer.read(root), whole):
                return _close(x, root, {curve, root, *inner.covered, *outer.covered})
    return None


def _close(x: torch.fx.Node, root: torch.fx.Node, nodes: set[torch.fx.Node]) -> Match | None:
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
    wide = value_of(root).dtype
    return Match(root, order, (x,), None if wide == value_of(x).dtype else wide)


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


RULE = Rule("tanh-gelu", "opgraft::gelu", match)
