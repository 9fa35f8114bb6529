"""``torch._dynamo.explain`` itself, run under our hooks, for the figures that it would print."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def run_explain(
    function: Callable[..., Any], options: dict[str, Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[int, int]:
    """Graphs and breaks as explain counts them. Older versions of explain take no options: they are given to
    ``torch.compile`` with explain's kind of backend instead."""
    import torch
    import torch._dynamo

    if not options:
        found = torch._dynamo.explain(function)(*args, **kwargs)
        return int(found.graph_count), int(found.graph_break_count)
    graphs = 0

    def count(graph: Any, inputs: Any) -> Any:
        nonlocal graphs
        graphs += 1
        return graph.forward

    torch._dynamo.reset()
    try:
        torch.compile(function, **{**options, "backend": count})(*args, **kwargs)
    finally:
        torch._dynamo.reset()
    return graphs, graphs - 1
