"""Quantisation to float8_e4m3fn in plain torch, shared by the rules of ops that give it.

scale = amax(|v|) / 448 over a row or over blocks of 128, at least a small number; codes = v / scale (or v times the
scale's reciprocal), clamped or not, cast. The ops' own least scale is 1 / (448 * 512): where the formula has another
one, or none, only rows that are smaller than any trained model's differ.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch

from opgraft.compile.metadata import same_shape
from opgraft.compile.rules.node_kind import CASTS, kind_of
from opgraft.compile.rules.rule import Emit
from opgraft.compile.rules.walk import (
    Node,
    Walk,
    argument,
    both_orders,
    is_last_dim,
    is_number,
    tensor_of,
)

_LARGEST = 448.0
_BLOCK = 128
_SMALL = 1e-4  # a least scale, or a least magnitude, up to which rows count as empty


@dataclass(frozen=True)
class Quantised:
    """``codes`` and ``scale`` are the two results, ``value`` what is quantised, of the row's shape."""

    walk: Walk
    codes: Node
    scale: Node
    value: Node
    block: int
    blocked: tuple[int, ...] = ()  # the shape of the codes where they are in blocks


def written(emit: Emit, op: Any, found: Quantised, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The op's codes and scales in the shapes that the formula has, and its third result where it has one."""
    result = emit(op, *args)
    codes, scales = (emit(operator.getitem, result, i) for i in range(2))
    if found.block:
        shape = found.blocked
        codes = emit(torch.ops.aten.reshape.default, codes, list(shape))
        scales = emit(torch.ops.aten.unsqueeze.default, scales, -1)
    more = len(op._schema.returns) - 2
    return (codes, scales, *(emit(operator.getitem, result, 2 + i) for i in range(more)))


def _but_one(sizes: Any) -> list[Any]:
    """Sizes for a reshape: numbers as they are, one symbolic size as -1."""
    return [s if isinstance(s, int) else -1 for s in sizes]


def find(node: Node) -> Quantised | None:
    """The quantisation that ends in a cast to float8_e4m3fn."""
    value = tensor_of(node)
    if kind_of(node) not in CASTS or value is None or value.dtype != torch.float8_e4m3fn or not node.args:
        return None
    walk = Walk()
    inner = _clamped(walk, node.args[0])
    if kind_of(inner) == "div" and len(inner.args) == 2:
        pairs = [(inner.args[0], inner.args[1], False)]
    elif kind_of(inner) == "mul":
        pairs = [(v, s, True) for v, s in both_orders(inner)]
    else:
        return None
    walk.nodes.add(inner)
    for scaled, factor, inverse in pairs:
        own = Walk()
        scale = _inverted(own, factor) if inverse else factor
        source = own.through_casts(scaled)
        if isinstance(scale, Node) and isinstance(source, Node) and _is_scale(own, scale, source):
            walk.nodes |= own.nodes
            walk.shared |= own.shared
            return _over_rows(walk, node, scale, source)
    return None


def _over_rows(walk: Walk, codes: Node, scale: Node, source: Node) -> Quantised | None:
    value = tensor_of(source)
    assert value is not None
    if any(not isinstance(s, int) for s in value.shape[:-1]) and sum(not isinstance(s, int) for s in value.shape) > 1:
        return None
    if kind_of(source) in ("view", "reshape", "unflatten") and value.dim() >= 2 and value.shape[-1] == _BLOCK:
        base = source.args[0]
        row = tensor_of(base)
        if row is not None and row.dim() == value.dim() - 1 and row.dtype == value.dtype:
            leading_same = all(a is b or a == b for a, b in zip(row.shape[:-1], value.shape[:-2], strict=True))
            if leading_same and isinstance(base, Node):
                walk.nodes.add(source)
                row_value = walk.through_casts(base)
                return Quantised(walk, codes, scale, row_value, _BLOCK, tuple(_but_one(value.shape)))
    return Quantised(walk, codes, scale, source, 0)


def _clamped(walk: Walk, node: Any) -> Any:
    if kind_of(node) not in ("clamp", "clip"):
        return node
    low, high = argument(node, 1, "min"), argument(node, 2, "max")
    if not (is_number(low) and is_number(high) and float(low) == -_LARGEST and float(high) == _LARGEST):
        return node
    walk.nodes.add(node)
    return node.args[0] if node.args else None


def _inverted(walk: Walk, node: Any) -> Any:
    """s of 1 / s."""
    if kind_of(node) == "reciprocal":
        walk.nodes.add(node)
        return node.args[0]
    if kind_of(node) == "div" and len(node.args) == 2 and node.args[0] in (1, 1.0):
        walk.nodes.add(node)
        return node.args[1]
    return None


def _is_scale(walk: Walk, scale: Node, source: Node) -> bool:
    """True where ``scale`` is the largest magnitude of ``source`` along its last dimension over 448."""
    value = tensor_of(scale)
    if value is None or value.dtype != torch.float32:
        return False
    node: Any = scale
    divided = False
    while isinstance(node, Node):
        kind = kind_of(node)
        if kind == "clamp" or kind == "clamp_min" or kind == "clip":
            least, most = argument(node, 1, "min"), argument(node, 2, "max")
            if not is_number(least) or not 0 < least <= _SMALL or most is not None:
                return False
            walk.nodes.add(node)
            node = node.args[0]
        elif kind in ("div", "mul") and not divided and len(node.args) == 2 and is_number(node.args[1]):
            factor = float(argument(node, 1, "other"))
            if abs((1.0 / factor if kind == "mul" and factor else factor) - _LARGEST) > 1e-3:
                return False
            divided = True
            walk.nodes.add(node)
            node = node.args[0]
        elif kind in CASTS:
            inner = walk.through_casts(node)
            if inner is node:
                return False
            node = inner
        elif kind == "amax":
            dim, keep = argument(node, 1, "dim"), argument(node, 2, "keepdim", False)
            rank = len(value.shape)
            magnitude: Any = node.args[0]
            walk.nodes.add(node)
            if not divided or keep is not True or not is_last_dim(dim, rank) or kind_of(magnitude) != "abs":
                return False
            walk.nodes.add(magnitude)
            base = walk.through_casts(magnitude.args[0])
            return base is source and same_shape_but_last(value, tensor_of(source))
        else:
            return False
    return False


def same_shape_but_last(scale: torch.Tensor, value: torch.Tensor | None) -> bool:
    return value is not None and scale.dim() == value.dim() and same_shape(scale[..., 0], value[..., 0])
