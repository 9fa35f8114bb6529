"""The autocast regions and the gradient mode in which each node of a Dynamo graph runs."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Scope:
    """``autocast``: the arguments of every open region that changes anything, outermost first. ``grad``: whether
    gradients are recorded."""

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


def is_mark(node: torch.fx.Node) -> bool:
    """True for the nodes at which a region begins or ends."""
    return any(is_named(node, name) for name in ("_enter_autocast", "_exit_autocast", "_set_grad_enabled"))


def scopes(graph: torch.fx.Graph) -> dict[torch.fx.Node, Scope]:
    """The scope of every node. A mark that leaves everything as it is has the scope of the nodes around it."""
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
        found[node] = Scope(_effective(stack), grad)
    return found


def _effective(regions: list[tuple[Any, ...]]) -> tuple[tuple[Any, ...], ...]:
    """Without those that switch autocast off where it is off already, as models do around what needs float32."""
    kept: list[tuple[Any, ...]] = []
    on: dict[str, bool] = {}
    for region in regions:
        device, _, enabled, *_ = region
        if enabled or on.get(device, torch.is_autocast_enabled(device)):
            kept.append(region)
            on[device] = enabled
    return tuple(kept)
