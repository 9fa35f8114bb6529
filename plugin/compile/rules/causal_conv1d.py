"""A depthwise causal convolution along time, with or without SiLU after it.

``F.conv1d`` over padded input: padded on both sides with the surplus cut off, as Mamba does it, or padded in front.
"""

from __future__ import annotations

import operator
from typing import Any

import torch

from opgraft.compile.metadata import same_size, value_of
from opgraft.compile.rules.node_kind import kind_of
from opgraft.compile.rules.rule import Emit, Match, Rule
from opgraft.compile.rules.walk import Node, Walk, argument, only_user, tensor_of


def match(node: Node) -> Match | None:
    if kind_of(node) != "conv1d":
        return None
    x, weight, bias = (argument(node, i, name) for i, name in enumerate(("input", "weight", "bias")))
    given, taps = tensor_of(x), tensor_of(weight)
    if given is None or taps is None or given.dim() != 3 or taps.dim() != 3 or not _is_depthwise(node, given, taps):
        return None
    width = taps.shape[2]
    walk = Walk()
    walk.nodes.add(node)
    padding = _single(argument(node, 4, "padding", 0))
    if padding == width - 1 and width > 1:
        causal = _cut(node, given)
    elif padding == 0:
        x = _padded_in_front(walk, x, width - 1)
        causal = node
    else:
        return None
    if causal is None or x is None:
        return None
    walk.nodes.add(causal)
    top = _silu_above(walk, causal)
    nodes = walk.closed(top)
    if nodes is None:
        return None
    channel_last = _is_channel_last(value_of(top))
    silu = top is not causal

    def write(emit: Emit, x: Any, weight: Any, bias: Any) -> tuple[Node, ...]:
        weight = emit(torch.ops.aten.squeeze.dim, weight, 1)
        if channel_last:
            x = emit(torch.ops.aten.transpose.int, x, 1, 2)
        both = emit(torch.ops.opgraft.causal_conv1d.default, x, weight, bias, None, None, silu, channel_last)
        out = emit(operator.getitem, both, 0)
        return (emit(torch.ops.aten.transpose.int, out, 1, 2) if channel_last else out,)

    return Match((top,), nodes, (x, weight, bias), write)


def _is_depthwise(node: Node, x: torch.Tensor, taps: torch.Tensor) -> bool:
    stride, dilation = _single(argument(node, 3, "stride", 1)), _single(argument(node, 5, "dilation", 1))
    groups = argument(node, 6, "groups", 1)
    return (
        (stride, dilation) == (1, 1)
        and isinstance(groups, int)
        and same_size(groups, x.shape[1])
        and same_size(groups, taps.shape[0])
        and taps.shape[1] == 1
        and isinstance(taps.shape[2], int)
    )


def _single(value: Any) -> Any:
    return value[0] if isinstance(value, (list, tuple)) and len(value) == 1 else value


def _cut(node: Node, x: torch.Tensor) -> Node | None:
    """The node that keeps the first ``length`` steps of the padded result."""
    user = only_user(node)
    value = tensor_of(user)
    if user is None or value is None or value.dim() != 3 or not same_size(value.shape[2], x.shape[2]):
        return None
    if not (same_size(value.shape[0], x.shape[0]) and same_size(value.shape[1], x.shape[1])):
        return None
    if kind_of(user) == "slice":
        dim, start, step = (argument(user, i, n, d) for i, n, d in ((1, "dim", 0), (2, "start", 0), (4, "step", 1)))
        return user if dim in (2, -1) and start in (0, None) and step == 1 else None
    if kind_of(user) != "getitem" or not isinstance(user.args[1], tuple):
        return None
    return user if all(part is Ellipsis or _from_the_start(part) for part in user.args[1]) else None


def _from_the_start(part: Any) -> bool:
    return isinstance(part, slice) and part.start in (0, None) and part.step in (1, None)


def _padded_in_front(walk: Walk, node: Any, count: int) -> Any:
    if count == 0:
        return node
    if kind_of(node) not in ("pad", "constant_pad_nd"):
        return None
    amounts, value = argument(node, 1, "pad"), argument(node, 3 if kind_of(node) == "pad" else 2, "value")
    mode = argument(node, 2, "mode", "constant") if kind_of(node) == "pad" else "constant"
    wanted = list(amounts) if isinstance(amounts, (list, tuple)) else []
    if mode != "constant" or value not in (None, 0, 0.0) or wanted[:2] != [count, 0] or any(wanted[2:]):
        return None
    walk.shared.add(node)
    return argument(node, 0, "input")


def _silu_above(walk: Walk, node: Node) -> Node:
    """The SiLU of the convolution, called or written as x sigmoid(x); the convolution itself where there is none."""
    user = only_user(node)
    if user is not None and kind_of(user) == "silu":
        return user
    users = list(node.users)
    curve = next((u for u in users if kind_of(u) == "sigmoid"), None)
    product = only_user(curve) if curve is not None else None
    if product is not None and len(users) == 2 and kind_of(product) == "mul" and set(product.args) == {node, curve}:
        walk.nodes.add(curve)  # type: ignore[arg-type]
        return product
    return node


def _is_channel_last(value: Any) -> bool:
    if not isinstance(value, torch.Tensor) or value.dim() != 3:
        return False
    return same_size(value.stride(1), 1) and not same_size(value.stride(2), 1)


RULE = Rule("causal-conv1d", "opgraft::causal_conv1d", match)
