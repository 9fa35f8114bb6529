"""A longer stretch of the graph around sites, as it was given and as it was chosen: the last word on a choice.

A site's surroundings end where the compiler stops fusing. What a choice does beyond (to a matrix product's epilogue,
to what is saved for backward, to caches) shows only in the model itself: the whole graph where it is short, else the
operations before and after the site, about a layer's worth. Some compilers' decisions are taken for a whole graph (the
layout of a convolution's ancestors for one), and show in nothing less.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.amp.autocast_mode import _enter_autocast, _exit_autocast

from opgraft.compile.change import Change, make_all
from opgraft.compile.metadata import facts, value_of
from opgraft.compile.mutation import writes
from opgraft.compile.neighbourhood import border, inner_graph, inner_graphs, spelled_nodes
from opgraft.compile.scope import Scope, is_mark, is_named
from opgraft.compile.site import Site, TensorFacts

MOST_NODES = 96  # beside the site's own, a level of vmap for one


@dataclass(frozen=True)
class Stretch:
    """Consecutive nodes of a graph, with the changes that fall into them. ``inputs``, ``sizes``, ``outputs`` and
    ``scope`` are those of a neighbourhood; ``kept`` are changes that stand in both forms, beside those compared."""

    changes: tuple[Change, ...]
    nodes: tuple[torch.fx.Node, ...]
    inputs: tuple[tuple[torch.fx.Node, TensorFacts], ...]
    sizes: dict[torch.fx.Node, int]
    outputs: tuple[torch.fx.Node, ...]
    scope: Scope
    kept: tuple[Change, ...] = ()

    @property
    def training(self) -> bool:
        return self.scope.grad and any(fact.requires_grad for _, fact in self.inputs)

    @property
    def bytes_written(self) -> int:
        """An upper bound of what running it holds at a time: every intermediate result."""
        known = [fact for node in self.nodes for fact in _tensors(value_of(node))]
        return sum(fact.bytes for fact in known)

    def signature(self) -> dict[str, Any]:
        """Everything that decides about speed here, with nodes as numbers."""
        place, found = spelled_nodes(self.inputs, self.nodes, self.sizes, self.outputs, self.scope, self.training)

        def spelled(changes: tuple[Change, ...]) -> list[Any]:
            return [[c.site.spec.name, c.site.idiom, [place[n] for n in c.site.nodes if n in place]] for c in changes]

        kept = {"kept": spelled(self.kept)} if self.kept else {}
        return {"stretch": found, "changes": spelled(self.changes), **kept}

    def holding(self, changes: Sequence[Change], kept: Sequence[Change]) -> Stretch:
        """The same nodes with other changes: those of the given that lie in it."""
        inside = set(self.nodes)

        def within(some: Sequence[Change]) -> tuple[Change, ...]:
            return tuple(
                c for c in some if inside.issuperset(n for n in (*c.site.nodes, *c.site.way_in) if _does_something(n))
            )

        return dataclasses.replace(self, changes=within(changes), kept=within(kept))

    def graph(self, *, chosen: bool) -> torch.fx.GraphModule:
        """The stretch as a module of its inputs, as it was given (but for what is kept) or with its changes."""
        graph = torch.fx.Graph()
        table: dict[torch.fx.Node, Any] = dict(self.sizes)
        for i, (node, _) in enumerate(self.inputs):
            table[node] = graph.placeholder(f"input_{i}")
            table[node].meta = {"example_value": value_of(node)}
        regions = [graph.call_function(_enter_autocast, region) for region in self.scope.autocast]
        for node in self.nodes:
            table[node] = graph.node_copy(node, table.__getitem__)
        for region in reversed(regions):
            graph.call_function(_exit_autocast, (region,))
        graph.output(tuple(table[node] for node in self.outputs))
        make_all([change.moved(table) for change in (*self.kept, *(self.changes if chosen else ()))])
        graph.lint()
        return torch.fx.GraphModule(inner_graphs(self.nodes), graph)


def _tensors(value: Any) -> list[TensorFacts]:
    values = value if isinstance(value, (tuple, list)) else (value,)
    return [fact for v in values if (fact := facts(v)) is not None]


def around(
    site: Site, changes: Sequence[Change], scopes: dict[torch.fx.Node, Scope], most: int = MOST_NODES
) -> Stretch | None:
    """The stretch around a site with all changes that lie in it; None where it would hold nothing but the site.

    Args:
        most: its nodes beside the site's own.
    """
    scope = scopes[site.root]
    everything = list(site.root.graph.nodes)
    order = {node: i for i, node in enumerate(everything)}
    levels = _levels(everything)
    places = [order[node] for node in (*site.nodes, *site.way_in)]
    low = min(levels.get(i, (i, i))[0] for i in places)
    high = max(levels.get(i, (i, i))[1] for i in places) + 1

    def can_run(first: int, end: int) -> bool:
        return all(_can_run(node, scopes, scope) for node in everything[first:end])

    if not can_run(low, high):
        return None
    open_below, open_above = True, True
    left = most
    while (open_below or open_above) and left > 0:
        if open_below := open_below and low > 0:
            first = levels.get(low - 1, (low - 1, 0))[0]
            if open_below := can_run(first, low):
                low, left = first, left - 1
        if open_above := open_above and high < len(everything):
            end = levels.get(high, (0, high))[1] + 1
            if open_above := can_run(high, end):
                high, left = end, left - 1
    nodes = tuple(node for node in everything[low:high] if _does_something(node))
    inside = set(nodes)
    if not inside - set(site.nodes):
        return None
    found = border(nodes)
    if found is None:
        return None
    return Stretch((), nodes, found.inputs, found.sizes, found.outputs, scope).holding(changes, ())


def _levels(nodes: Sequence[torch.fx.Node]) -> dict[int, tuple[int, int]]:
    """For the places of nodes within a level of vmap the first and the last place of it: a level is run as a whole."""
    found: dict[int, tuple[int, int]] = {}
    opened: list[int] = []
    for i, node in enumerate(nodes):
        if is_named(node, "_vmap_increment_nesting"):
            opened.append(i)
        elif is_named(node, "_vmap_decrement_nesting") and opened:
            first = opened.pop()
            if not opened:
                found.update(dict.fromkeys(range(first, i + 1), (first, i)))
    return found


def _opens_or_closes_a_level(node: torch.fx.Node) -> bool:
    return is_named(node, "_vmap_increment_nesting") or is_named(node, "_vmap_decrement_nesting")


def _can_run(node: torch.fx.Node, scopes: dict[torch.fx.Node, Scope], scope: Scope) -> bool:
    if scopes[node] != scope or (node.op not in ("call_function", "call_method") and inner_graph(node) is None):
        return False
    if node.op == "get_attr" or _opens_or_closes_a_level(node):
        return True
    if not _does_something(node):
        return True
    target: Any = node.target
    space = getattr(target, "namespace", "") or ""
    return not writes(node) and "c10d" not in space and value_of(node) is not None


def _does_something(node: torch.fx.Node) -> bool:
    """False for calls for their side effect that torch leaves in its graphs and that change no tensor: among nodes of
    one scope these are also the marks of regions, which then change nothing."""
    return not is_mark(node) and getattr(node.target, "__name__", "") not in (
        "_log_api_usage_once",
        "lazy_load_decompositions",
    )
