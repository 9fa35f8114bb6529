"""Steps over a graph that several rules share: through casts and views, to the factors of a product, to a closed match.

A rule walks from a node that only its idiom has, downwards to the arguments and upwards to the result, and notes what
it passed. ``closed`` then says whether these nodes may be replaced.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from opgraft.compile.metadata import is_static, same_shape, value_of
from opgraft.compile.mutation import writes, written_between
from opgraft.compile.rules.node_kind import CASTS, ORDER_KEEPING_VIEWS, kind_of
from opgraft.compile.rules.polynomial import widens

Node = torch.fx.Node


class Walk:
    """The nodes passed so far. ``shared`` are those that others may read as well: they stay where they are read."""

    def __init__(self) -> None:
        self.nodes: set[Node] = set()
        self.shared: set[Node] = set()

    def through_casts(self, value: Any, *, narrowing: bool = False) -> Any:
        """What floating casts, and calls that return the same elements in the same shape, are of."""
        while (source := _cast_of(value, narrowing)) is not None:
            self.shared.add(value)
            value = source
        return value

    def through_views(self, value: Any) -> Any:
        """What order-keeping views and widening casts are of."""
        while isinstance(value, Node):
            source = value.args[0] if value.args else None
            if kind_of(value) in ORDER_KEEPING_VIEWS and isinstance(source, Node) and _same_elements(value, source):
                self.shared.add(value)
                value = source
            elif (cast := _cast_of(value, False)) is not None:
                self.shared.add(value)
                value = cast
            else:
                break
        return value

    def take(self, other: Walk, top: Node) -> None:
        """Adds what another walk passed, with its result: that now lies inside."""
        self.nodes |= other.nodes | {top}
        self.shared |= other.shared

    def closed(self, *outputs: Node) -> tuple[Node, ...] | None:
        """All nodes in the graph's order, where nothing else reads what lies between and nothing writes meanwhile."""
        inside = {*self.nodes, *outputs}
        # A shared node goes along where only the match reads it, or what goes along with the match.
        for node in sorted(self.shared - inside, reverse=True):
            if inside.issuperset(node.users):
                inside.add(node)
        for node in inside:
            if node not in outputs and node not in self.shared and not inside.issuperset(node.users):
                return None
        order = tuple(sorted(inside))
        return None if written_between(order) else order


def _cast_of(value: Any, narrowing: bool) -> Node | None:
    if not isinstance(value, Node) or kind_of(value) not in CASTS | {"contiguous"} or not value.args:
        return None
    source = value.args[0]
    before, after = value_of(source), value_of(value)
    if not isinstance(source, Node) or not isinstance(before, torch.Tensor) or not isinstance(after, torch.Tensor):
        return None
    if not before.is_floating_point() or not after.is_floating_point() or before.device != after.device:
        return None
    return source if narrowing or widens(before.dtype, after.dtype) else None


def _same_elements(view: Node, source: Node) -> bool:
    before, after = value_of(source), value_of(view)
    return isinstance(before, torch.Tensor) and isinstance(after, torch.Tensor) and before.dtype == after.dtype


def argument(node: Node, place: int, name: str, default: Any = None) -> Any:
    """An argument by position or by name."""
    if len(node.args) > place:
        return node.args[place]
    return node.kwargs.get(name, default)


def both_orders(node: Node) -> Iterator[tuple[Any, Any]]:
    """The two operands of a commutative call, in both orders; nothing for a call that has more to it."""
    if len(node.args) == 2 and not node.kwargs:
        yield node.args[0], node.args[1]
        yield node.args[1], node.args[0]


def only_user(node: Node) -> Node | None:
    """The node that alone reads a value, if there is one."""
    users = list(node.users)
    return users[0] if len(users) == 1 else None


def dead_from(node: Node) -> set[Node]:
    """A node and all that reads it, where nothing of that is ever read or has an effect; else nothing."""
    found: set[Node] = set()
    waiting = [node]
    while waiting:
        current = waiting.pop()
        if current.op not in ("call_function", "call_method") or writes(current) or current.is_impure():
            return set()
        found.add(current)
        waiting.extend(user for user in current.users if user not in found)
    return found


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def tensor_of(node: Any) -> torch.Tensor | None:
    value = value_of(node)
    return value if isinstance(value, torch.Tensor) else None


def is_last_dim(dim: Any, rank: int) -> bool:
    """True where an argument ``dim`` means the last dimension alone."""
    dims = list(dim) if isinstance(dim, (list, tuple)) else [dim]
    return len(dims) == 1 and isinstance(dims[0], int) and dims[0] % rank == rank - 1


def like(left: Any, right: Any) -> bool:
    """True where two nodes have one shape, dtype and device."""
    a, b = tensor_of(left), tensor_of(right)
    return a is not None and b is not None and a.dtype == b.dtype and a.device == b.device and same_shape(a, b)


def sum_of_alike(node: Any) -> tuple[Node, Node] | None:
    """The two parts of a sum of tensors of one shape and dtype."""
    if kind_of(node) != "add" or len(node.args) != 2 or node.kwargs:
        return None
    left, right = node.args
    return (left, right) if like(left, node) and like(right, node) else None


def static_last(node: Any) -> int | None:
    """The size of the last dimension where it is a number."""
    value = tensor_of(node)
    size = value.shape[-1] if value is not None and value.dim() else None
    return size if isinstance(size, int) else None


def is_static_node(node: Any) -> bool:
    value = tensor_of(node)
    return value is not None and is_static(value)
