"""One name for the many spellings of an operation: function, operator, method, aten overload."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch._ops import OpOverload, OpOverloadPacket

_ALIASES = {
    "multiply": "mul", "subtract": "sub", "divide": "div", "true_divide": "div", "truediv": "div", "negative": "neg",
    "expit": "sigmoid", "radd": "add", "rmul": "mul",
}  # fmt: skip
_KINDS = frozenset(
    [
        "mul",
        "add",
        "sub",
        "rsub",
        "div",
        "neg",
        "pow",
        "square",
        "tanh",
        "sigmoid",
        "erf",
        "gelu",
        "silu",
        "mean",
        "sum",
        "rsqrt",
        "sqrt",
        "rms_norm",
        "cross_entropy",
        "nll_loss",
        "log_softmax",
        "pad",
        "constant_pad_nd",
        "slice",
        "select",
        "getitem",
        "stack",
        "cat",
        "movedim",
        "permute",
        "transpose",
        "unbind",
        "zeros",
        "zeros_like",
        "new_zeros",
        "abs",
        "amax",
        "max",
        "clamp",
        "clamp_min",
        "clip",
        "reciprocal",
        "maximum",
        "minimum",
        "linear",
        "conv1d",
        "conv2d",
        "conv3d",
        "view",
        "reshape",
        "flatten",
        "unflatten",
        "squeeze",
        "unsqueeze",
        "contiguous",
        "clone",
        "to",
        "float",
        "double",
        "half",
        "bfloat16",
        "type",
        "type_as",
        "_to_copy",
    ]
)
CASTS = frozenset(["to", "float", "double", "half", "bfloat16", "type", "type_as", "_to_copy"])
ORDER_KEEPING_VIEWS = frozenset(["view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "contiguous"])
_ARITHMETIC = {getattr(operator, n): n for n in ("mul", "add", "sub", "neg", "pow", "truediv", "getitem")}


def kind_of(node: Any) -> str | None:
    """The kind of a node: ``"mul"`` for ``torch.mul``, ``*``, ``.mul`` and ``aten.mul.Tensor``; None if unknown."""
    if not isinstance(node, torch.fx.Node):
        return None
    if node.op == "call_method":
        name = str(node.target)
        name = name[2:-2] if name.startswith("__") and name.endswith("__") else name
    elif node.op == "call_function":
        name = _function_name(node.target)
    else:
        return None
    name = _ALIASES.get(name, name)
    return name if name in _KINDS and node.kwargs.get("out") is None else None


def _function_name(target: Any) -> str:
    if isinstance(target, (OpOverload, OpOverloadPacket)):
        space, _, name = (
            target._schema.name if isinstance(target, OpOverload) else target._qualified_op_name
        ).partition("::")
        return name if space == "aten" else ""
    if target in _ARITHMETIC:
        return _ARITHMETIC[target]
    name = getattr(target, "__name__", "")
    owners = (torch, torch.nn.functional, torch._C._nn, torch.special)
    return name if any(getattr(owner, name, None) is target for owner in owners) else ""
