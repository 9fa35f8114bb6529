"""RMS norm in plain torch, as models write it, shared by the rules of the norms.

x / sqrt(mean(x^2) + eps), by ``rsqrt``, by a root and a division or by a power, in float32 or not; then a weight or
``offset + weight``, before or after the cast back; and the call ``F.rms_norm``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from opgraft.compile.metadata import same_size
from opgraft.compile.rules.node_kind import CASTS, kind_of
from opgraft.compile.rules.walk import (
    Node,
    Walk,
    argument,
    both_orders,
    is_last_dim,
    is_number,
    only_user,
    tensor_of,
)

_DEEPEST = 12  # nodes looked at below a result
_ROOTS = frozenset(["rsqrt", "sqrt", "pow"])


@dataclass(frozen=True)
class Norm:
    """A norm found: ``root`` is its result. ``rounded``: the normalised x was cast before the weight."""

    walk: Walk
    root: Node
    x: Node
    weight: Node | None
    eps: float
    offset: float
    rounded: bool

    @property
    def options(self) -> tuple[float, float, bool]:
        return self.eps, self.offset, self.rounded


def find(node: Node) -> Norm | None:
    """The norm around a node that only a norm has: the root of the mean square, or the call of ``F.rms_norm``."""
    kind = kind_of(node)
    if kind == "rms_norm":
        return _called(node)
    if kind not in _ROOTS or not node.args or (kind == "pow" and argument(node, 1, "exponent") != -0.5):
        return None
    walk = Walk()
    walk.nodes.add(node)
    found = _mean_square(walk, node.args[0])
    if found is None:
        return None
    x, eps = found
    normal = _normalised(walk, node, x, divides=kind == "sqrt")
    return _with_weight(walk, normal, x, eps) if normal is not None else None


def below(result: Node) -> Norm | None:
    """The norm whose result a node is, casts aside."""
    walk = Walk()
    top = walk.through_casts(result, narrowing=True)
    waiting: list[Any] = [top]
    seen: set[Node] = set()
    while waiting and len(seen) < _DEEPEST:
        node = waiting.pop(0)
        if not isinstance(node, Node) or node in seen:
            continue
        seen.add(node)
        found = find(node)
        if found is not None:
            root = Walk().through_casts(found.root, narrowing=True)
            if root is not top and found.root is not top and found.root is not result:
                return None
            found.walk.shared |= walk.shared
            return found
        waiting.extend(node.all_input_nodes)
    return None


def _called(node: Node) -> Norm | None:
    x, weight = argument(node, 0, "input"), argument(node, 2, "weight")
    shape, eps = argument(node, 1, "normalized_shape"), argument(node, 3, "eps")
    value = tensor_of(x)
    if value is None or not isinstance(shape, (tuple, list)) or len(shape) != 1 or not isinstance(x, Node):
        return None
    if eps is None and value.dtype in (torch.float32, torch.float64):
        eps = torch.finfo(value.dtype).eps
    if not is_number(eps) or (weight is not None and not _is_row(weight, value)):
        return None
    walk = Walk()
    walk.nodes.add(node)
    return Norm(walk, node, x, weight, float(eps), 0.0, False)


def _mean_square(walk: Walk, value: Any) -> tuple[Node, float] | None:
    """x and eps of ``mean(x^2) + eps``."""
    if kind_of(value) != "add":
        return None
    for mean, eps in both_orders(value):
        if is_number(eps) and eps >= 0:
            mean = walk.through_casts(mean)
            square = _averaged(walk, mean)
            x = _squared(walk, square) if square is not None else None
            if x is not None:
                walk.nodes.add(value)
                return x, float(eps)
    return None


def _averaged(walk: Walk, node: Any) -> Any:
    """What ``mean(.., -1, keepdim=True)`` is of, or the same by a sum."""
    kind = kind_of(node)
    if kind == "div" and len(node.args) == 2 and kind_of(node.args[0]) == "sum":
        total = node.args[0]
        value = tensor_of(total.args[0]) if total.args else None
        if value is None or not value.dim() or node.args[1] != value.shape[-1] or not is_number(node.args[1]):
            return None
        found = _reduced(total)
        walk.nodes.update({node, total} if found is not None else ())
        return found
    if kind != "mean":
        return None
    found = _reduced(node)
    walk.nodes.update({node} if found is not None else ())
    return found


def _reduced(node: Node) -> Any:
    source = argument(node, 0, "input")
    value = tensor_of(source)
    dim, keep = argument(node, 1, "dim"), argument(node, 2, "keepdim", False)
    plain = value is not None and not set(node.kwargs) - {"dim", "keepdim", "input"} and len(node.args) <= 3
    return source if plain and keep is True and value is not None and is_last_dim(dim, value.dim()) else None


def _squared(walk: Walk, node: Any) -> Node | None:
    node = walk.through_casts(node)
    kind = kind_of(node)
    if kind == "mul":
        left, right = (walk.through_casts(a) for a in node.args)
        base = left if left is right else None
    elif kind == "square" or (kind == "pow" and argument(node, 1, "exponent") in (2, 2.0)):
        base = walk.through_casts(node.args[0])
    else:
        return None
    if not isinstance(base, Node) or tensor_of(base) is None:
        return None
    walk.nodes.add(node)
    return base


def _normalised(walk: Walk, root: Node, x: Node, *, divides: bool) -> Node | None:
    """The product of x and the root, or x divided by it."""
    user = only_user(root)
    while user is not None and kind_of(user) in CASTS:
        walk.nodes.add(user)
        user = only_user(user)
    if user is None or len(user.args) != 2 or kind_of(user) != ("div" if divides else "mul"):
        return None
    pairs = [(user.args[0], user.args[1])] if divides else list(both_orders(user))
    for left, _ in pairs:
        other = Walk()
        if other.through_casts(left) is x and left is not root:
            walk.shared |= other.shared
            walk.nodes.add(user)
            return user
    return None


def _with_weight(walk: Walk, normal: Node, x: Node, eps: float) -> Norm | None:
    """The largest result above the normalised x: with a weight where there is one, and cast back."""
    value = tensor_of(x)
    assert value is not None
    top, passed = normal, [normal]
    while (user := only_user(top)) is not None and kind_of(user) in CASTS and _floats(user):
        top = user
        passed.append(top)
    rounded = _is_narrower(top, normal)
    user = only_user(top)
    if user is not None and kind_of(user) == "mul":
        for left, right in both_orders(user):
            inner = Walk()
            weight = _weight(inner, right, value) if left is top else None
            if weight is not None:
                walk.nodes.update(passed)
                walk.nodes |= inner.nodes
                walk.shared |= inner.shared
                return Norm(walk, _cast_back(walk, user, value), x, weight[0], eps, weight[1], rounded)
    # Without a weight: end at the first node that has x's own dtype.
    for i, node in enumerate(passed):
        if (found := tensor_of(node)) is not None and found.dtype == value.dtype:
            walk.nodes.update(passed[: i + 1])
            return Norm(walk, node, x, None, eps, 0.0, False)
    return None


def _weight(walk: Walk, value: Any, x: torch.Tensor) -> tuple[Node, float] | None:
    """A row of x's length, or a number and such a row added."""
    value = walk.through_casts(value, narrowing=True)
    if kind_of(value) == "add":
        for row, offset in both_orders(value):
            row = walk.through_casts(row)
            if is_number(offset) and _is_row(row, x):
                walk.nodes.add(value)
                return row, float(offset)
    return (value, 0.0) if _is_row(value, x) else None


def _cast_back(walk: Walk, root: Node, x: torch.Tensor) -> Node:
    """The cast to x's dtype after a product that is wider."""
    value, user = tensor_of(root), only_user(root)
    if value is not None and value.dtype != x.dtype and user is not None and kind_of(user) in CASTS:
        after = tensor_of(user)
        if after is not None and after.dtype == x.dtype:
            walk.nodes.add(root)
            return user
    return root


def _is_row(node: Any, x: torch.Tensor) -> bool:
    value = tensor_of(node)
    return value is not None and value.dim() == 1 and x.dim() > 0 and same_size(value.shape[0], x.shape[-1])


def _floats(node: Node) -> bool:
    value = tensor_of(node)
    return value is not None and value.is_floating_point() and value.dtype.itemsize > 1


def _is_narrower(after: Node, before: Node) -> bool:
    a, b = tensor_of(after), tensor_of(before)
    return a is not None and b is not None and a.dtype.itemsize < b.dtype.itemsize
