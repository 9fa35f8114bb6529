"""Cross entropy as models call it: ``F.cross_entropy`` on rows of logits, which transformers first casts to float32.

The op takes the logits as they were before the cast: it computes in float32 and reads half the bytes. Where a gradient
is wanted and that is faster, it is the op that makes the gradient in the same pass.
"""

from __future__ import annotations

import operator
from typing import Any

import torch

from opgraft.compile.metadata import same_shape
from opgraft.compile.rules.node_kind import kind_of
from opgraft.compile.rules.rule import Emit, Match, Rule
from opgraft.compile.rules.walk import Node, Walk, argument, is_number, static_last, tensor_of
from opgraft.ops.cross_entropy import scaling_pays

_REDUCTIONS = {"none": 0, "mean": 1, "sum": 2}


def match(node: Node) -> Match | None:
    kind = kind_of(node)
    if kind == "cross_entropy":
        smoothing = argument(node, 7, "label_smoothing", 0.0)
        return _match(node, argument(node, 0, "input"), {node}, smoothing)
    if kind == "nll_loss":
        logarithm = argument(node, 0, "input")
        value = tensor_of(logarithm)
        if kind_of(logarithm) != "log_softmax" or value is None or value.dim() != 2:
            return None
        if argument(logarithm, 1, "dim") not in (1, -1) or argument(logarithm, 3, "dtype") is not None:
            return None
        return _match(node, argument(logarithm, 0, "input"), {node, logarithm}, 0.0)
    return None


def _match(node: Node, logits: Any, nodes: set[Node], smoothing: Any) -> Match | None:
    target, weight = argument(node, 1, "target"), argument(node, 2, "weight")
    ignored, reduction = argument(node, 4, "ignore_index", -100), argument(node, 6, "reduction", "mean")
    old_style = (argument(node, 3, "size_average"), argument(node, 5, "reduce"))
    rows, classes, result = tensor_of(logits), tensor_of(target), tensor_of(node)
    if rows is None or classes is None or result is None or rows.dim() != 2 or classes.dim() != 1:
        return None
    if reduction not in _REDUCTIONS or old_style != (None, None) or classes.is_floating_point():
        return None
    if not isinstance(ignored, int) or not is_number(smoothing) or static_last(logits) is None:
        return None
    walk = Walk()
    walk.nodes |= nodes
    source = walk.through_views(logits)
    if not same_shape_last(source, logits):
        walk = Walk()
        walk.nodes |= nodes
        source = walk.through_casts(logits)
    order = walk.closed(node)
    if order is None:
        return None
    options = (ignored, float(smoothing), 0.0, 0.0, _REDUCTIONS[reduction])
    length, dtype = static_last(logits), result.dtype
    before = tensor_of(source)
    flatten = before is not None and not same_shape(before, rows)
    wide = torch.promote_types(before.dtype, torch.float32) if before is not None else torch.float32
    op = torch.ops.opgraft.cross_entropy.default
    if before is not None and result.requires_grad and scaling_pays(before, options[-1]):
        op = torch.ops.opgraft.cross_entropy_with_gradient.default

    def write(emit: Emit, logits: Any, target: Any, weight: Any) -> tuple[Node, ...]:
        if flatten:
            logits = emit(torch.ops.aten.reshape.default, logits, [-1, length])
        if weight is not None:
            weight = emit(torch.ops.aten._to_copy.default, weight, dtype=wide)
        found = emit(op, logits, target, weight, *options)
        loss = emit(operator.getitem, found, 0)
        return (loss if dtype == wide else emit(torch.ops.aten._to_copy.default, loss, dtype=dtype),)

    return Match((node,), order, (source, target, weight), write)


def same_shape_last(source: Any, logits: Any) -> bool:
    """True where views kept the dimension of classes: the op counts it last, whatever is before."""
    return isinstance(source, Node) and static_last(source) == static_last(logits)


RULE = Rule("cross-entropy", "opgraft::cross_entropy", match)
