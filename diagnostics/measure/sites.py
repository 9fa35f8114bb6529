"""The places where an op is called in a traced graph, and the exchange of the op for its reference there.

Both sides of a comparison go through the same backend: only the targets of these nodes differ. A node whose target is
the reference is traced into by AOTAutograd, so the reference's own operations, gradients included, reach the compiler
as if the model had been written with them.
"""

from __future__ import annotations

import linecache
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch._ops import OpOverload, OpOverloadPacket

from opgraft import registry
from opgraft.diagnostics.measure import _compat
from opgraft.diagnostics.model import Location
from opgraft.registry import qualified_name

_FRAME = re.compile(r'^\s*File "(?P<path>[^"]+)", line (?P<line>\d+), in (?P<function>\S+)', re.MULTILINE)
# Frames of torch and of this package (its public functions wrap the overloads) are not lines that a reader changes.
_OWN = tuple(
    str(p) + os.sep for p in (Path(torch.__file__).parent, Path(registry.__file__).parent, Path(__file__).parents[1])
)


@dataclass(frozen=True)
class Site:
    """One node of one graph that calls an op."""

    op: str
    location: Location
    graph: int


def overload_of(target: Any) -> OpOverload | None:
    """The overload that a graph node calls, where it calls one without doubt."""
    if isinstance(target, OpOverload):
        return target
    if isinstance(target, OpOverloadPacket):
        names = target.overloads()
        return getattr(target, "default" if "default" in names else names[0]) if names else None
    return None


def is_custom(op: OpOverload) -> bool:
    """True for an op that neither torch nor a library of the torch project itself defines."""
    return op.namespace not in _TORCH_NAMESPACES


_TORCH_NAMESPACES = frozenset(
    [
        "aten",
        "prims",
        "prim",
        "profiler",
        "inductor",
        "_inductor_test",
        "rngprims",
        "higher_order",
        "c10d",
        "_c10d_functional",
        "quantized",
        "quantized_decomposed",
        "c10d_functional",
        "symm_mem",
        "_quantized",
        "mkl",
        "mkldnn",
        "mkldnn_prim",
        "onednn",
        "xnnpack",
        "prepacked",
        "sparse",
        "torchvision",
        "triton",
        "static_runtime",
        "aoti",
        "aoti_torchgen",
        "bucketing",
        "dtensor",
        "fsdp",
        "debugprims",
        "export",
        "autograd",
        "streams",
        "debug_mode_ops",
    ]
)


def location_of(stack_trace: str | None) -> Location:
    """The innermost frame of a node's stack that is neither torch's nor this package's measuring code."""
    frames = [m for m in _FRAME.finditer(stack_trace or "") if not m["path"].startswith(_OWN)]
    if not frames:
        return Location(path="<unknown>", line=1)
    inner = frames[-1]
    line = int(inner["line"])
    return Location(
        path=inner["path"], line=line, function=inner["function"], text=linecache.getline(inner["path"], line).strip()
    )


def graphs_within(module: torch.fx.GraphModule) -> Iterator[torch.fx.GraphModule]:
    """The graph and those of the higher-order ops inside it (checkpoints, conditionals, autograd functions)."""
    for child in module.modules():
        if isinstance(child, torch.fx.GraphModule):
            yield child


def nodes_of_ops(module: torch.fx.GraphModule) -> Iterator[tuple[torch.fx.GraphModule, torch.fx.Node, OpOverload]]:
    for graph in graphs_within(module):
        for node in graph.graph.nodes:
            if node.op == "call_function" and (op := overload_of(node.target)) is not None:
                yield graph, node, op


def replace(module: torch.fx.GraphModule, references: Mapping[str, Callable[..., Any]]) -> int:
    """Exchanges the targets of every node whose op is named in ``references``, in place; returns how many."""
    touched: dict[int, torch.fx.GraphModule] = {}
    count = 0
    for graph, node, op in nodes_of_ops(module):
        name = qualified_name(op)
        if name in references:
            node.target = references[name]
            touched[id(graph)] = graph
            count += 1
    for graph in touched.values():
        graph.recompile()
    return count


def as_target(op: str, reference: Callable[..., Any]) -> Callable[..., Any]:
    """The reference under a name that generated graph code can hold, whatever the user gave (lambdas, partials)."""

    def target(*args: Any, **kwargs: Any) -> Any:
        return reference(*args, **kwargs)

    target.__name__ = target.__qualname__ = "reference_of_" + re.sub(r"\W", "_", op)
    return target


class SiteBackend:
    """A Dynamo backend: notes every call of a custom op, exchanges those in ``references``, and hands the graph on.

    Attributes:
        graphs: how many graphs were compiled, recompiles included.
        compile_ids: under which ids; a frame whose graph is empty never comes here.
        sites: every call of a custom op that was seen, exchanged ones included.
    """

    def __init__(self, inner: Callable[..., Any], references: Mapping[str, Callable[..., Any]]) -> None:
        self.inner = inner
        self.references = {name: as_target(name, function) for name, function in references.items()}
        self.graphs = 0
        self.compile_ids: set[str] = set()
        self.sites: list[Site] = []

    def __call__(self, module: torch.fx.GraphModule, inputs: list[Any], **kwargs: Any) -> Any:
        for _, node, op in nodes_of_ops(module):
            if is_custom(op):
                self.sites.append(Site(qualified_name(op), location_of(node.meta.get("stack_trace")), self.graphs))
        self.graphs += 1
        self.compile_ids.add(_compat.compile_id())
        replace(module, self.references)
        return self.inner(module, inputs, **kwargs)
