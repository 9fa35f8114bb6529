"""The autocast regions and the gradient mode in which each node of a Dynamo graph runs."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Scope:
    """``autocast``: the arguments of every open region, outermost first. ``grad``: whether gradients are recorded."""

    autocast: tuple[tuple[Any, ...], ...] = ()
    grad: bool = True

    def autocast_regions(self) -> contextlib.ExitStack:
        """All regions entered; what runs inside sees the dtypes that the site's nodes see."""
        stack = contextlib.ExitStack()
        for device, dtype, enabled, cached in self.autocast:
            stack.enter_context(torch.autocast(device, dtype, enabled, cached))
        return stack


def is_named(node: torch.fx.Node, name: str) -> bool:
    return node.op == "call_function" and getattr(node.target, "__name__", "") == name


def scopes(graph: torch.fx.Graph) -> dict[torch.fx.Node, Scope]:
    """The scope of every node."""
    stack: list[tuple[Any, ...]] = []
    grad = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
    found = {}
    for node in graph.nodes:
        if is_named(node, "_enter_autocast"):
            stack.append(tuple(node.args))
        elif is_named(node, "_exit_autocast") and stack:
            stack.pop()
        elif is_named(node, "_set_grad_enabled"):
            grad = bool(node.args[0])
        found[node] = Scope(tuple(stack), grad)
    return found
