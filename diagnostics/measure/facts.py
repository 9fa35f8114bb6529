"""What the compiler made of each arm: kernels, bytes and copies, from the scheduler with caches off.

A cache hit skips the scheduler, so the arms are compiled again for this, and never the way the user timed them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import msgspec
from torch._ops import OpOverload

from opgraft.diagnostics.measure import _compat
from opgraft.diagnostics.measure.prices import Prices
from opgraft.diagnostics.measure.sites import SiteBackend, is_custom
from opgraft.registry import qualified_name

_COPYING = frozenset(("load", "store", "get_index", "index_expr", "to_dtype", "to_dtype_bitcast", "constant"))


class NodeFact(msgspec.Struct, frozen=True, kw_only=True):
    """One kernel of a compiled graph. ``bytes`` counts every buffer that it reads or writes once."""

    graph: int
    kind: Literal["generated", "op", "library"]
    name: str
    bytes: int
    role: Literal["", "layout copy", "functional copy", "cast", "copy"] = ""


class Recorder:
    """Takes the scheduler's nodes, graph by graph; ``graph`` says which is being compiled."""

    def __init__(self) -> None:
        self.graph = -1
        self.nodes: list[NodeFact] = []

    def __call__(self, nodes: list[Any]) -> list[Any]:
        op_reads: frozenset[str] = frozenset().union(
            *(_compat.node_reads(n) for n in nodes if custom_overload(n) is not None)
        )
        for node in nodes:
            if not _compat.node_is_nothing(node):
                self.nodes.append(self._fact(node, op_reads))
        return nodes

    def _fact(self, node: Any, op_reads: frozenset[str]) -> NodeFact:
        size = _compat.node_bytes(node)
        op = custom_overload(node)
        if op is not None:
            return NodeFact(graph=self.graph, kind="op", name=qualified_name(op), bytes=size)
        origins = _compat.node_origins(node)
        name = " ".join(origins)
        if _compat.node_is_extern(node):
            return NodeFact(graph=self.graph, kind="library", name=name, bytes=size)
        return NodeFact(graph=self.graph, kind="generated", name=name, bytes=size, role=_role(node, origins, op_reads))


def custom_overload(node: Any) -> OpOverload | None:
    op = _compat.node_overload(node)
    return op if isinstance(op, OpOverload) and is_custom(op) else None


def _role(node: Any, origins: tuple[str, ...], op_reads: frozenset[str]) -> Any:
    """Whether a generated kernel computes nothing, and then why it is there."""
    operations = _compat.body_operations(node)
    if not operations or not operations <= _COPYING:
        return ""
    if "to_dtype" in operations:
        return "cast"
    if any("auto_functionalized" in o or "copy_" in o for o in origins):
        return "functional copy"
    return "layout copy" if _compat.node_writes(node) & op_reads else "copy"


class FactsBackend(SiteBackend):
    """The arm's backend with the recorder in force, and a count of how often each graph runs."""

    def __init__(
        self, inner: Callable[..., Any], references: Mapping[str, Callable[..., Any]], recorder: Recorder
    ) -> None:
        super().__init__(inner, references)
        self.recorder = recorder
        self.executions: list[int] = []

    def __call__(self, module: Any, inputs: list[Any], **kwargs: Any) -> Any:
        index = self.graphs
        self.recorder.graph = index
        self.executions.append(0)
        compiled = super().__call__(module, inputs, **kwargs)

        def counted(*args: Any) -> Any:
            self.executions[index] += 1
            return compiled(*args)

        return counted


class ArmFacts(msgspec.Struct, frozen=True, kw_only=True):
    """One arm: its kernels with how often a step runs each graph, and where a step's time goes, in microseconds.

    Attributes:
        runs: runs of each graph a step.
        generated_us, op_us, library_us: kernel time by who wrote the kernel. Library is everything that is neither
            generated nor one of the ops: matrix products, attention, the optimiser.
        span_us: from the first kernel's start to the last one's end.
        enqueue_us: host time to issue a step from an idle device; on a CPU, the step.
        queued_us: a step on the GPU alone, issued ahead and without the profiler; 0 where that cannot be had.
        host_share: what the host needed to issue the timed steps, as a share of what they took; 0 where unknown.
        paced_share: what the timed steps take by those two clocks alone, the host's and ``queued_us``, as a share of
            what they took; 0 where unknown.
        kernels: kernels a step, of each sort.
        launches, replays: calls a step with which the host starts GPU work, and those of them that replay a CUDA graph.
        saved_bytes: memory that forward leaves for backward.
        partitions, skips: CUDA-graph segments that a graph was cut into, and graphs that none was recorded for.
    """

    name: str
    nodes: tuple[NodeFact, ...] = ()
    runs: tuple[float, ...] = ()
    generated_us: float = 0.0
    op_us: float = 0.0
    library_us: float = 0.0
    span_us: float = 0.0
    enqueue_us: float = 0.0
    step_us: float = 0.0
    queued_us: float = 0.0
    host_share: float = 0.0
    paced_share: float = 0.0
    kernels: dict[str, float] = {}
    launches: float = 0.0
    replays: float = 0.0
    saved_bytes: int = 0
    partitions: int = 0
    skips: int = 0
    failed: str = ""

    def scaled(self, factor: float) -> ArmFacts:
        """The same facts at another speed of the machine."""
        names = ("generated_us", "op_us", "library_us", "span_us", "enqueue_us", "step_us")
        return msgspec.structs.replace(self, **{name: getattr(self, name) * factor for name in names})

    @property
    def kernel_us(self) -> float:
        return self.generated_us + self.op_us + self.library_us

    def bytes(self, kind: str = "generated", role: str | None = None) -> float:
        """Bytes a step moves in kernels of a kind (and role)."""
        return sum(
            n.bytes * self.executions(n.graph)
            for n in self.nodes
            if n.kind == kind and (role is None or n.role == role)
        )

    def count(self, kind: str | None = None, role: str | None = None) -> float:
        return sum(
            self.executions(n.graph)
            for n in self.nodes
            if (kind is None or n.kind == kind) and (role is None or n.role == role)
        )

    def executions(self, graph: int) -> float:
        return self.runs[graph] if 0 <= graph < len(self.runs) else 1.0


class FactsReading(msgspec.Struct, frozen=True, kw_only=True):
    """The facts of all arms, of the references alone, and the op alone timed in the same process.

    Attributes:
        alone_us: a step's calls of each form with a cold cache; ``in_place_us`` the same with their inputs as warm as
            the step leaves them.
        host_us_of_calls: host time of a step's calls of the ops, backward ops included, and of the generated kernels
            that the op's graph has beyond the compiler's, inside the compiler's step; ``host_us_of_step`` that of the
            step at the same time.
        prices: what a kernel takes that only moves bytes.
        calls: calls a step, of the model's forward alone.
    """

    arms: tuple[ArmFacts, ...] = ()
    reference: ArmFacts | None = None
    alone_us: dict[str, float] = {}
    in_place_us: dict[str, float] = {}
    host_us_of_calls: float = 0.0
    host_us_of_step: float = 0.0
    copy_bytes_per_second: float = 0.0
    prices: Prices = Prices()
    ideal_bytes: int = 0
    calls: int = 0
    degraded: tuple[str, ...] = ()

    def arm(self, name: str) -> ArmFacts | None:
        return next((a for a in self.arms if a.name == name and not a.failed), None)
