"""The graphs with custom ops that Dynamo hands to a backend: kept in the run, compiled again afterwards and watched.

Keeping imports nothing of torch; a cold compile runs in a fork, with fresh caches, since a warm one shows nothing.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from opgraft.diagnostics import _compat
from opgraft.diagnostics.conform.lab import met
from opgraft.diagnostics.conform.lab.met import Book
from opgraft.diagnostics.conform.lab.site import from_text
from opgraft.diagnostics.conform.lab.tap import TORCH_NAMESPACES, Listener, wrap
from opgraft.diagnostics.model import Location

MOST_GRAPHS = 6


@dataclass
class Graph:
    """A graph as Dynamo made it, with inputs like those that it got, and the backend that it was for."""

    module: Any
    inputs: list[Any]
    backend: Any
    ops: tuple[str, ...]
    grad: bool
    # What Inductor generated for it in the run, or handed out from a cache: the forward first.
    sources: list[str] = field(default_factory=list)


def custom_nodes(graph: Any) -> Iterator[tuple[str, Any]]:
    """The nodes that call a custom op, by the op's name."""
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        target = node.target
        name = getattr(target, "_qualified_op_name", None) or getattr(getattr(target, "_schema", None), "name", "")
        if name and name.partition("::")[0] not in TORCH_NAMESPACES and "::" in name:
            yield name, node


def watch(listener: Listener, graphs: list[Graph]) -> None:
    """Keeps the graphs of the compiles to come. To be called once Dynamo is there."""
    output_graph: Any = sys.modules["torch._dynamo.output_graph"]

    def around(original: Callable[..., Any]) -> Callable[..., Any]:
        def call_user_compiler(self: Any, gm: Any, *args: Any, **kwargs: Any) -> Any:
            kept = None
            if listener.on and len(graphs) < MOST_GRAPHS:
                with contextlib.suppress(Exception):
                    kept = keep(self, gm, listener.book, graphs)
            suspect = None
            if listener.on:
                with contextlib.suppress(Exception):
                    suspect = statement(gm)
            inductor = kept if kept is not None and is_inductor(kept.backend) else None
            try:
                with sources(inductor.sources) if inductor is not None else contextlib.nullcontext():
                    return original(self, gm, *args, **kwargs)
            except Exception as error:
                if listener.on and suspect is not None:
                    text = f"{type(error).__name__}: {error}"[:4000]
                    listener.book.events.append({"what": "backend-failed", "where": suspect, "text": text})
                raise

        return call_user_compiler

    wrap(output_graph.OutputGraph, "call_user_compiler", around, listener)


def statement(gm: Any) -> Location | None:
    """The statement around which a compile of this graph most likely fails: one that puts a custom op into a branch or
    a loop of the compiler's, else one that calls a custom op. None for a graph without custom ops."""
    inner = {
        name: any(True for _ in custom_nodes(module.graph))
        for name, module in gm.named_children()
        if hasattr(module, "graph")
    }
    for node in gm.graph.nodes:
        if node.op == "call_function" and any(inner.get(str(getattr(arg, "target", ""))) for arg in node.args):
            place = from_text(str(node.meta.get("stack_trace") or ""))
            if place is not None:
                return place
    places = [from_text(str(node.meta.get("stack_trace") or "")) for _, node in custom_nodes(gm.graph)]
    return next((place for place in places if place is not None), None)


def keep(output_graph: Any, gm: Any, book: Book, graphs: list[Graph]) -> Graph | None:
    """A copy of the graph, if it has a custom op in it, and its real inputs."""
    torch = sys.modules["torch"]
    ops = tuple(dict.fromkeys(name for name, _ in custom_nodes(gm.graph)))
    if not ops:
        return None
    copy = torch.fx.Graph()
    # The nodes alone: a deep copy would take their example values, and the modules, along.
    values: dict[Any, Any] = {}
    result = copy.graph_copy(gm.graph, values)
    copy.output(result)
    for old, new in values.items():
        new.meta = {key: old.meta[key] for key in ("stack_trace",) if key in old.meta}
    examples = [getattr(argument, "example", None) for argument in output_graph.graphargs]
    with torch._C._DisableTorchDispatch():
        inputs = [met.keep(example, book) for example in examples]
    kept = Graph(torch.fx.GraphModule(gm, copy), inputs, output_graph.compiler_fn, ops, torch.is_grad_enabled())
    graphs.append(kept)
    return kept


@contextlib.contextmanager
def sources(into: list[str]) -> Iterator[None]:
    """Collects the code of what Inductor compiles, or takes from its caches, meanwhile."""
    compiled = _compat.compiled_graph()
    original = compiled.post_compile

    def post_compile(self: Any, *args: Any, **kwargs: Any) -> Any:
        into.append(str(getattr(self, "source_code", "")))
        return original(self, *args, **kwargs)

    compiled.post_compile = post_compile
    try:
        yield
    finally:
        compiled.post_compile = original


def calls(source: str, op: str) -> tuple[int, tuple[str, ...]]:
    """How many calls of an op stand in generated code, and the shapes and strides that it expects of their results."""
    namespace, _, name = op.partition("::")
    name = name.partition(".")[0]
    lines = [line for line in source.splitlines() if not line.lstrip().startswith(("#", "//"))]
    asserts = [line for line in lines if "assert_size_stride(" in line and f"{namespace}.{name}." in line]
    word = re.compile(rf"torch\.ops\.{re.escape(namespace)}\.{re.escape(name)}\b|{re.escape(op)}\b")
    count = sum(len(word.findall(line)) for line in lines if line not in asserts)
    # The name of a buffer depends on what else is in the graph.
    return count, tuple(line.partition(",")[2].strip() for line in asserts)


@dataclass
class Seen:
    """What a cold compile of a graph showed, by op."""

    layout_bytes: dict[str, int] = field(default_factory=dict)
    functional_bytes: dict[str, int] = field(default_factory=dict)


def places(graph: Graph) -> dict[str, Location]:
    """Where each op of the graph is called."""
    found: dict[str, Location] = {}
    for name, node in custom_nodes(graph.module.graph):
        location = from_text(str(node.meta.get("stack_trace") or ""))
        if location is not None:
            found.setdefault(name, location)
    return found


def is_inductor(backend: Any) -> bool:
    """Does this backend end in Inductor?"""
    inner = getattr(backend, "_torchdynamo_orig_backend", backend)
    words = f"{getattr(inner, 'compiler_name', '')} {type(inner).__name__} {getattr(inner, '__name__', '')}".lower()
    return "inductor" in words or "compile_fx" in words


@contextlib.contextmanager
def cold(seen: Seen) -> Iterator[None]:
    """Fresh caches, and eyes on the copies that Inductor makes for an op's layout rule or for its writes."""
    import torch
    from torch._inductor import config, ir
    from torch._inductor.utils import fresh_cache
    from torch._inductor.virtualized import V

    wanted = {"force_disable_caches": True, "cpp_cache_precompile_headers": False, "compile_threads": 1}
    settings: dict[str, Any] = {name: value for name, value in wanted.items() if hasattr(config, name)}
    kernel: Any = ir.ExternKernel
    original = kernel.copy_input

    def copy_input(cls: Any, x: Any) -> Any:
        node = getattr(V.graph, "current_node", None)
        target = getattr(node, "target", None)
        name = getattr(getattr(target, "_schema", None), "name", "")
        # What is not in memory yet is computed into the layout that is asked for: no copy.
        if name and name.partition("::")[0] not in TORCH_NAMESPACES:
            with contextlib.suppress(Exception):
                size = int(x.get_numel()) * x.get_dtype().itemsize if ir.is_storage_and_layout(x) else 0
                seen.layout_bytes[name] = seen.layout_bytes.get(name, 0) + size
        return original(x)

    post_grad: Any = _compat.loaded("torch._inductor.fx_passes.post_grad")
    if post_grad is None:
        import importlib

        post_grad = importlib.import_module("torch._inductor.fx_passes.post_grad")
    decompose = post_grad.decompose_auto_functionalized

    def decompose_auto_functionalized(graph: Any) -> Any:
        for node in graph.nodes:
            if "auto_functionalized" in str(node.target) and node.args:
                with contextlib.suppress(Exception):
                    size = cloned_bytes(node)
                    name = node.args[0]._schema.name
                    if size:
                        seen.functional_bytes[name] = seen.functional_bytes.get(name, 0) + size
        result = decompose(graph)
        with contextlib.suppress(Exception):
            for name, size in written_back(graph):
                seen.functional_bytes[name] = seen.functional_bytes.get(name, 0) + size
        return result

    _compat.know_vector_units()
    with fresh_cache(), config.patch(**settings), torch._dynamo.config.patch(suppress_errors=False):
        kernel.copy_input = classmethod(copy_input)
        post_grad.decompose_auto_functionalized = decompose_auto_functionalized
        try:
            yield
        finally:
            kernel.copy_input = original
            post_grad.decompose_auto_functionalized = decompose


def cloned_bytes(node: Any) -> int:
    """Bytes of the written arguments that have to be cloned before the op of this node may write them."""
    chosen = node.meta.get("only_clone_these_tensors")
    bases = node.kwargs.get("_all_bases")
    if bases is not None:
        tensors = [bases[index] for index in (range(len(bases)) if chosen is None else chosen)]
    else:
        names = [arg.name for arg in node.args[0]._schema.arguments if arg.alias_info and arg.alias_info.is_write]
        tensors = [node.kwargs.get(name) for name in (names if chosen is None else chosen)]
    total = 0
    for tensor in tensors:
        value = getattr(tensor, "meta", {}).get("val")
        if value is not None:
            total += int(value.numel()) * value.element_size()
    return total


def written_back(graph: Any) -> Iterator[tuple[str, int]]:
    """Copies at the end of a graph of what an op wrote into a stand-in (such as a dtype view) back into an input."""
    written: dict[Any, str] = {}
    for name, node in custom_nodes(graph):
        for index, argument in enumerate(node.target._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = node.args[index] if index < len(node.args) else node.kwargs.get(argument.name)
                if value is not None:
                    written[value] = name
    for node in graph.nodes:
        if node.op == "call_function" and "aten.copy_" in str(node.target) and node.args[0].op == "placeholder":
            source = node.args[1]
            while source not in written and source.args and hasattr(source.args[0], "op"):
                source = source.args[0]
            value = node.args[0].meta.get("val")
            # An op that wrote the input itself leaves nothing to copy.
            if source in written and source is not node.args[0] and value is not None:
                yield written[source], int(value.numel()) * value.element_size()
