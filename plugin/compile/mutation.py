"""Which nodes of a Dynamo graph write to memory that other nodes may read. Unknown callables count as writers."""

from __future__ import annotations

import builtins
import operator
from typing import Any

import torch
from torch._ops import OpOverload, OpOverloadPacket

from opgraft.compile.scope import is_mark

# iadd of add, iand of and_: Python's keywords have an underscore, which means no write here.
_IN_PLACE_NAMES = frozenset(
    n for n in dir(operator) if n[0] == "i" and (hasattr(operator, n[1:]) or hasattr(operator, f"{n[1:]}_"))
)
_WRITING_OPERATORS = frozenset([*(getattr(operator, n) for n in _IN_PLACE_NAMES), operator.setitem, operator.delitem])
_WRITING_METHODS = frozenset([*(f"__{n}__" for n in _IN_PLACE_NAMES), "__setitem__", "__delitem__"])
_PURE_HIGHER_ORDER = frozenset(["associative_scan"])  # torch refuses a function that writes


def writes(node: torch.fx.Node) -> bool:
    """True where a node may write to a tensor."""
    if node.op in ("placeholder", "get_attr", "output"):
        return False
    if node.op == "call_method":
        name = str(node.target)
        return name in _WRITING_METHODS or (name.endswith("_") and not name.endswith("__"))
    if node.op != "call_function":
        return True
    target: Any = node.target
    if isinstance(target, OpOverload):
        return bool(target._schema.is_mutable)
    if isinstance(target, OpOverloadPacket):
        return any(getattr(target, name)._schema.is_mutable for name in target.overloads())
    if node.kwargs.get("out") is not None or node.kwargs.get("inplace"):
        return True
    if target in _WRITING_OPERATORS:
        return True
    if is_mark(node):
        return False
    name = getattr(target, "__name__", "")
    module = getattr(target, "__module__", None) or ""
    if isinstance(target, torch._ops.HigherOrderOperator):
        return name not in _PURE_HIGHER_ORDER
    if module == "_operator":
        return False
    if module.startswith(("torch", "math")) or hasattr(builtins, name) or _is_torch_builtin(target):
        return name.endswith("_") and not name.endswith("__")
    return True


def _is_torch_builtin(target: Any) -> bool:
    return type(target).__name__ in ("builtin_function_or_method", "method_descriptor")


def written_between(nodes: tuple[torch.fx.Node, ...]) -> bool:
    """True where some node from the first to the last of ``nodes``, in the graph's order, writes to memory."""
    wanted = set(nodes)
    left = len(wanted)
    inside = False
    for node in nodes[0].graph.nodes:
        if node in wanted:
            inside = True
            left -= 1
        if inside and writes(node):
            return True
        if not left:
            return False
    return True
