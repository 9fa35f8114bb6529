"""The fusible surroundings of a site, cut out as a graph of their own with the kernel or the compiler's code inside.

A kernel is opaque: what it costs is not its own time alone but the fusion that its neighbours lose. So both candidates
are compiled with the producers and consumers that a compiler would fuse, up to the next node it would not.
"""

from __future__ import annotations

import hashlib
import json
import operator
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch.amp.autocast_mode import _enter_autocast, _exit_autocast

from opgraft import registry
from opgraft.compile.answers import Word, spelled
from opgraft.compile.find import overload_of
from opgraft.compile.metadata import facts_of, number, value_of
from opgraft.compile.rewrite import put_kernel
from opgraft.compile.scope import Scope
from opgraft.compile.site import Site, TensorFacts

_MOST_NODES = 40


@dataclass(frozen=True)
class Neighbourhood:
    """A convex part of a graph around one site.

    Attributes:
        nodes: its nodes in the graph's order, the site's among them.
        inputs: the nodes outside that it reads, tensors only, with their facts.
        sizes: symbolic numbers from outside, as their hints.
        outputs: its nodes that are read outside.
        scope: the autocast regions and gradient mode that all of it runs in.
    """

    site: Site
    nodes: tuple[torch.fx.Node, ...]
    inputs: tuple[tuple[torch.fx.Node, TensorFacts], ...]
    sizes: dict[torch.fx.Node, int]
    outputs: tuple[torch.fx.Node, ...]
    scope: Scope

    @property
    def training(self) -> bool:
        """True where gradients flow through: then forward and backward are measured together."""
        return self.scope.grad and any(fact.requires_grad for _, fact in self.inputs)

    @property
    def dynamic(self) -> bool:
        return any(fact.dynamic for _, fact in self.inputs)

    def describe(self) -> str:
        """The nodes in order, the site in brackets: ``mul [opgraft::gelu] mul``."""
        inside = set(self.site.nodes)
        words = []
        for node in self.nodes:
            if node is self.site.root:
                words.append(f"[{self.site.idiom or self.site.spec.name}]")
            elif node not in inside and node.op != "get_attr":
                words.append(_name(node))
        return " ".join(words)

    def signature(self) -> dict[str, Any]:
        """Everything that decides about speed here, with nodes as numbers: equal for the same code in another layer."""
        place, found = spelled_nodes(self.inputs, self.nodes, self.sizes, self.outputs, self.scope, self.training)
        return {
            "op": self.site.spec.name,
            "idiom": self.site.idiom,
            "site": [place[node] for node in self.site.nodes],
            **found,
        }

    def graph(self, *, kernel: bool) -> torch.fx.GraphModule:
        """The neighbourhood as a module of its inputs, with the kernel or the reference at the site.

        Other ops around are in their references' form, which is what decides their own fate later.
        """
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
        for node in self.nodes:
            spec = _spec_of(node)
            if spec is not None and not (kernel and node is self.site.root and not self.site.idiom):
                table[node].target = _as_target(spec)
        if kernel and self.site.idiom:
            put_kernel(self.site.moved(table))
        graph.lint()
        return torch.fx.GraphModule(inner_graphs(self.nodes), graph)


def inner_graphs(nodes: Iterable[torch.fx.Node]) -> dict[str, torch.fx.GraphModule]:
    """The graphs that higher-order ops among the nodes are given, by the names under which they are read."""
    return {str(node.target): inner for node in nodes if (inner := inner_graph(node)) is not None}


def inner_graph(node: torch.fx.Node) -> torch.fx.GraphModule | None:
    """The graph that a node reads from the module around; None for every other node."""
    inner = getattr(node.graph.owning_module, str(node.target), None) if node.op == "get_attr" else None
    return inner if isinstance(inner, torch.fx.GraphModule) else None


def spelled_nodes(
    inputs: tuple[tuple[torch.fx.Node, TensorFacts], ...],
    nodes: tuple[torch.fx.Node, ...],
    sizes: dict[torch.fx.Node, int],
    outputs: tuple[torch.fx.Node, ...],
    scope: Scope,
    training: bool,
) -> tuple[dict[torch.fx.Node, str], dict[str, Any]]:
    """A part of a graph as text, its nodes numbered; and the number of each node."""
    place = {node: f"%{i}" for i, node in enumerate([node for node, _ in inputs] + list(nodes))}
    place.update({node: str(bucket(size)) for node, size in sizes.items()})

    def text(value: Any) -> str:
        return spelled(value, lambda node: Word(place[node]))

    return place, {
        "nodes": [[_name(n), text(n.args), text(dict(n.kwargs))] for n in nodes],
        "inputs": [_fact(fact, training) for _, fact in inputs],
        "outputs": [place[node] for node in outputs],
        "autocast": [repr(region) for region in scope.autocast],
        "training": training,
    }


def _fact(fact: TensorFacts, training: bool) -> list[Any]:
    shape = [f"~{bucket(s)}" if i in fact.dynamic else s for i, s in enumerate(fact.shape)]
    stride: list[Any] = (
        list(fact.stride) if not fact.dynamic else sorted(range(len(fact.stride)), key=lambda i: (-fact.stride[i], i))
    )
    return [shape, stride, str(fact.dtype), fact.device.type, training and fact.requires_grad]


def bucket(size: int) -> int:
    """The power of two at or above a size: dynamic sizes in one bucket share a decision."""
    return 1 << max(size - 1, 0).bit_length()


def _spec_of(node: torch.fx.Node) -> registry.OpSpec | None:
    op = overload_of(node.target) if node.op == "call_function" else None
    return registry.find(op) if op is not None else None


def _name(node: torch.fx.Node) -> str:
    if (inner := inner_graph(node)) is not None:
        return inner.code
    target: Any = node.target
    if node.op == "call_method":
        return f".{target}"
    schema = getattr(target, "_schema", None)
    return str(schema.name) if schema is not None else str(getattr(target, "__name__", target))


@cache
def _as_target(spec: registry.OpSpec) -> Callable[..., Any]:
    """The reference under a name that generated graph code can hold, whatever it is (a lambda, a partial)."""

    def target(*args: Any, **kwargs: Any) -> Any:
        return spec.reference(*args, **kwargs)

    target.__name__ = target.__qualname__ = "reference_of_" + re.sub(r"\W", "_", spec.name)
    return target


def around(
    site: Site, scopes: dict[torch.fx.Node, Scope], fusible: Callable[[torch.fx.Node], bool]
) -> Neighbourhood | None:
    """The neighbourhood of a site; None where a shape in it is unknown or depends on data."""
    scope = scopes[site.root]
    inside = {*site.nodes, *site.way_in}
    if any(scopes[node] != scope for node in inside):
        return None

    def admits(node: torch.fx.Node) -> bool:
        if len(inside) >= _MOST_NODES or scopes[node] != scope or not _measurable(node):
            return False
        return _takes_apart(node) or fusible(node)

    # Both walks end where no neighbour of the part is left undecided: a deep model has many sites.
    before: set[torch.fx.Node] = set()  # nodes outside on which the part depends
    waiting = {read for node in inside for read in _producers(node)} - inside
    node = max(inside)
    while waiting:
        node = node.prev
        if node in inside:
            continue
        leads_back = bool(before.intersection(node.users))
        if node in waiting and not leads_back and admits(node):
            inside.add(node)
            waiting.update(read for read in _producers(node) if read not in inside)
        elif leads_back or node in waiting:
            before.add(node)
        waiting.discard(node)
    after: set[torch.fx.Node] = set()  # nodes outside that depend on the part
    waiting = {user for node in inside for user in _consumers(node)} - inside
    node = min(inside)
    while waiting:
        node = node.next
        if node in inside or node.op == "output":
            continue
        if after.intersection(node.all_input_nodes) or (node in waiting and not admits(node)):
            after.add(node)
        elif node in waiting:
            inside.add(node)
            waiting.update(user for user in _consumers(node) if user not in inside)
        waiting.discard(node)
    return _close(site, tuple(sorted(inside)), scope)


def _producers(node: torch.fx.Node) -> list[torch.fx.Node]:
    """What a node reads, but for the graph's own inputs, which no part takes in."""
    return [read for read in node.all_input_nodes if read.op in ("call_function", "call_method")]


def _consumers(node: torch.fx.Node) -> list[torch.fx.Node]:
    return [user for user in node.users if user.op != "output"]


def _takes_apart(node: torch.fx.Node) -> bool:
    """True for the node that picks one of several results: it goes with the call that gives them."""
    source = node.args[0] if node.args else None
    return node.target is operator.getitem and isinstance(value_of(source), (tuple, list))


def _measurable(node: torch.fx.Node) -> bool:
    return facts_of(node) is not None or isinstance(value_of(node), (tuple, list))


@dataclass(frozen=True)
class Border:
    """What a set of nodes reads from outside, tensors and symbolic numbers, and which of its nodes are read outside."""

    inputs: tuple[tuple[torch.fx.Node, TensorFacts], ...]
    sizes: dict[torch.fx.Node, int]
    leaving: tuple[torch.fx.Node, ...]

    @property
    def outputs(self) -> tuple[torch.fx.Node, ...]:
        """Those of the leaving nodes that are tensors."""
        return tuple(node for node in self.leaving if facts_of(node) is not None)


def border(nodes: tuple[torch.fx.Node, ...]) -> Border | None:
    """The border of ``nodes``; None where they read something whose facts are not known, or no tensor crosses it."""
    inside = set(nodes)
    inputs: dict[torch.fx.Node, TensorFacts] = {}
    sizes: dict[torch.fx.Node, int] = {}
    for node in nodes:
        for read in node.all_input_nodes:
            if read in inside or read in inputs or read in sizes:
                continue
            fact, size = facts_of(read), number(value_of(read))
            if fact is not None:
                inputs[read] = fact
            elif size is not None:
                sizes[read] = size
            else:
                return None
    leaving = tuple(node for node in nodes if any(user not in inside for user in node.users))
    found = Border(tuple(inputs.items()), sizes, leaving)
    return found if found.inputs and found.outputs else None


def _close(site: Site, nodes: tuple[torch.fx.Node, ...], scope: Scope) -> Neighbourhood | None:
    found = border(nodes)
    if found is None or found.leaving != found.outputs:
        return None
    return Neighbourhood(site, nodes, found.inputs, found.sizes, found.outputs, scope)


def digest(signature: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(signature, sort_keys=True).encode()).hexdigest()[:24]
