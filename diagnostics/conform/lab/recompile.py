"""Compiles the kept graphs again, cold, and says what that shows of the ops in them."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from opgraft.diagnostics import _compat
from opgraft.diagnostics.conform.lab import compare, graphs, met
from opgraft.diagnostics.conform.lab.graphs import Graph, Seen
from opgraft.diagnostics.conform.lab.incidents import make
from opgraft.diagnostics.conform.lab.isolate import Send
from opgraft.diagnostics.conform.lab.tap import Tap
from opgraft.diagnostics.conform.lab.tree import leaves, tensors
from opgraft.diagnostics.model import Finding, Location
from opgraft.registry import resolve

# Inputs of an op that differ by no more than a few spacings of their dtype differ by rounding.
SPACINGS = 8.0


@dataclass(frozen=True)
class Arm:
    """One way of running a graph: its results, and what its custom ops were given."""

    outputs: list[Any]
    given: dict[str, list[list[Any]]]


class _Inputs:
    """Notes what the custom ops are given, in eager and in compiled code alike."""

    def __init__(self, ops: tuple[str, ...]) -> None:
        self.ops = ops
        self.given: dict[str, list[list[Any]]] = {}
        self.taps: list[tuple[Any, Any]] = []

    def call(self, name: str, inner: Any, args: Any, kwargs: Any) -> Any:
        if all(type(tensor) in (torch.Tensor, torch.nn.Parameter) for tensor in tensors((args, kwargs))):
            self.given.setdefault(name, []).append([tensor.detach().clone() for tensor in tensors((args, kwargs))])
        return inner(*args, **kwargs)

    def __enter__(self) -> _Inputs:
        for name in self.ops:
            overload: Any = resolve(name)
            self.taps.append((overload, overload._op))
            overload._op = Tap(self, name, overload._op)  # type: ignore[arg-type]
        return self

    def __exit__(self, *_: object) -> None:
        for overload, inner in self.taps:
            overload._op = inner


def _inputs(graph: Graph) -> list[Any]:
    return [met.rebuild(value) for value in graph.inputs]


def run(graph: Graph, function: Any) -> Arm:
    torch.manual_seed(0)
    with torch.set_grad_enabled(graph.grad), _Inputs(graph.ops) as notes:
        inputs = _inputs(graph)
        outputs = function(*inputs)
    return Arm([*(leaf for leaf in leaves(outputs)), *tensors(inputs)], notes.given)


def compile_again(graph: Graph, seen: Seen) -> Any:
    """The graph compiled by its own backend, with fresh caches."""
    torch._dynamo.reset()
    backend = getattr(graph.backend, "_torchdynamo_orig_backend", graph.backend)

    def call(*args: Any) -> Any:
        # A backend may edit the graph that it is given.
        module = torch.fx.GraphModule(graph.module, copy.deepcopy(graph.module.graph))
        with graphs.cold(seen):
            return backend(module, list(args))(*args)

    return call


def _rounding(eager: Arm, other: Arm) -> tuple[str, bool]:
    """The op whose inputs differ between two arms, and whether by rounding alone."""
    for name, calls in eager.given.items():
        theirs = other.given.get(name, [])
        for ours, given in zip(calls, theirs, strict=False):
            for a, b in zip(ours, given, strict=False):
                if not isinstance(a, torch.Tensor) or a.shape != b.shape or not a.dtype.is_floating_point:
                    continue
                if a.element_size() > 2:
                    continue  # the order of operations alone changes the last bits of float32
                off = compare.difference(a, b)
                if off:
                    return name, off <= SPACINGS * compare.epsilon(a.dtype)
    return "", False


def examine(graph: Graph) -> Iterator[Finding]:
    """Copies for layout and for writes, and results that differ by rounding."""
    places = graphs.places(graph)
    seen = Seen()
    eager = run(graph, graph.module)
    fresh: list[str] = []
    with graphs.sources(fresh):
        compiled = run(graph, compile_again(graph, seen))
    for name, size in seen.layout_bytes.items():
        if not size:
            continue
        yield make(
            "layout-copy",
            f"{name}: the compiler copies an input of {size} bytes for the op's layout rule",
            places.get(name),
            name,
            "set-layout-tag",
            "honour-strides",
            severity="note",
        )
    for name, size in seen.functional_bytes.items():
        yield make(
            "functional-copy",
            f"{name}: {size} bytes are copied before the op writes them, which eager does not do",
            places.get(name),
            name,
            "make-functional",
            "add-out-variant",
            "reorder-writes",
            severity="note",
        )
    again = run(graph, graph.module)
    if compare.disagree(eager.outputs, again.outputs, 1):
        return
    if _compat.cache_hits():
        yield from stale(graph, fresh, places)
    if _equal(eager, compiled):
        return
    name, small = _rounding(eager, compiled)
    if name and small:
        yield make(
            "precision",
            f"{name} is given inputs that differ by rounding from those of eager, since fusion keeps higher precision "
            "before it; the op itself conforms",
            places.get(name),
            name,
            "leave-it",
            severity="note",
        )


def stale(graph: Graph, fresh: list[str], places: dict[str, Location]) -> Iterator[Finding]:
    """Code that came out of a cache and is not what a fresh compile gives.

    A cache knows an op by its name: an entry that an earlier process made for another schema or fake of it is handed
    out still.
    """
    if not graph.sources or not fresh:
        return
    for name in graph.ops:
        (ours, layout), (theirs, wanted) = graphs.calls(graph.sources[0], name), graphs.calls(fresh[0], name)
        words = ""
        if ours != theirs:
            words = f"it calls the op {times(ours)}, a fresh compile {times(theirs)}"
        elif layout != wanted:
            words = "it expects results of other shapes or strides than a fresh compile"
        if words:
            yield make(
                "stale-cache",
                f"The compiled code of a graph with {name} comes out of a compile cache, and is not that of the op as "
                f"it is registered now: {words}. A cache knows ops by name.",
                places.get(name),
                name,
                "clear-cache",
                evidence=tuple(f"from the cache: {line}" for line in layout if line not in wanted),
            )


def times(count: int) -> str:
    return {0: "never", 1: "once"}.get(count, f"{count} times")


def _equal(left: Arm, right: Arm) -> bool:
    pairs = zip(left.outputs, right.outputs, strict=False)
    return all(not isinstance(a, torch.Tensor) or compare.difference(a, b) == 0 for a, b in pairs)


def check_graphs(kept: list[Graph], send: Send, seconds: float) -> None:
    """Compiles what Inductor compiled again and sends what that showed, as long as there is time."""
    import msgspec

    from opgraft.diagnostics.conform.lab.isolate import run_isolated

    stop = time.monotonic() + seconds
    for graph in kept:
        left = stop - time.monotonic()
        if left < 2.0 or not graphs.is_inductor(graph.backend):
            continue

        def work(tell: Send, graph: Graph = graph) -> None:
            torch.set_num_threads(1)
            _compat.quiet_compiler()
            for finding in examine(graph):
                tell({"say": "finding", "finding": msgspec.to_builtins(finding)})

        ending = run_isolated(work, send, seconds=left)
        if ending.how == "broke":
            send({"say": "note", "text": ending.detail})
