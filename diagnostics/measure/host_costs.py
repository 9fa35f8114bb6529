"""What the host needs for the op's calls and for the generated kernels that they part, inside the compiler's own step.

A call over and over costs a fraction of one among others, whose code and data no cache holds: by how much depends on
what runs between two of them, and no small graph knows that. So the compiler's arm is compiled once more with the calls
beside it: at every site, on arguments of their own, so that what the compiler fuses stays fused; in a training step the
calls of the backward op as well, and as many small kernels as the op's graph has more than the compiler's. What the
host needs for that step beyond the compiler's is the price. The op's arm takes no part.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

from opgraft.diagnostics.measure import _compat, clock, statistics
from opgraft.diagnostics.measure.arms import Arm, make_arm
from opgraft.diagnostics.measure.calls import Call
from opgraft.diagnostics.measure.question import Question
from opgraft.diagnostics.measure.sites import SiteBackend, nodes_of_ops, replace
from opgraft.diagnostics.measure.subject import Subject
from opgraft.registry import qualified_name

_ROUNDS, _BURST = 40, 3
# All calls have arguments of their own up to so many bytes; beyond them fewer calls are made, and the rest reckoned.
_MOST_BYTES = 4 << 30

# What a site's op runs, its backward included: each an op and arguments.
Runs = Mapping[str, Sequence[tuple[OpOverload, Call]]]


@dataclass(frozen=True)
class HostCosts:
    """Host microseconds of the compiler's step, and what the op's calls and the kernels beside them add to it."""

    step_us: float = 0.0
    more_us: float = 0.0


class _Beside(SiteBackend):
    """The compiler's arm with calls beside its sites. The graph is given away with more inputs and more outputs.

    ``wanted`` counts the sites, and ``made`` those that got their calls.
    """

    def __init__(self, inner: Callable[..., Any], references: Mapping[str, Any], runs: Runs, kernels: float) -> None:
        super().__init__(inner, references)
        self.runs, self.kernels = runs, kernels
        self.room = _MOST_BYTES
        self.made = self.wanted = 0

    def __call__(self, module: torch.fx.GraphModule, inputs: list[Any], **kwargs: Any) -> Any:
        # A copy: Dynamo reads its own graph once more, and what it notes about it does not hold for more inputs.
        module = _copied(module)
        sites = [(owner, node, qualified_name(op)) for owner, node, op in nodes_of_ops(module)]
        sites = [site for site in sites if site[2] in self.runs]
        # What is added below stays what it is.
        replace(module, self.references)
        beside = _Additions(module.graph)
        kernels = 0.0
        for owner, node, name in sites:
            self.wanted += 1
            if sum(call.bytes for _, call in self.runs[name]) > self.room:
                continue
            self.made += 1
            kernels += self.kernels
            # A site within a part of the graph (a checkpoint) has its calls at the end of the whole.
            before = node.next if owner is module else beside.end
            for function, call in self.runs[name]:
                self.room -= call.bytes
                beside.call(before, function, call, kernels > 0.5)
                kernels -= kernels > 0.5
        results = beside.finish()
        module.recompile()
        compiled = self.inner(module, [*inputs, *map(_compat.as_static, beside.given)], **kwargs)
        if not beside.given:
            return compiled
        return lambda *args: compiled(*args, *beside.given)[:results]


class _Additions:
    """Calls that a graph is given: their arguments as further inputs, their results as further outputs."""

    def __init__(self, graph: torch.fx.Graph) -> None:
        self.graph = graph
        self.end = next(iter(graph.find_nodes(op="output")))
        self.given: list[torch.Tensor] = []
        self.outputs: list[torch.fx.Node] = []
        self.first = next(n for n in graph.nodes if n.op != "placeholder")

    def call(self, before: torch.fx.Node, function: OpOverload, call: Call, kernel: bool) -> None:
        """Adds a call, and a small generated kernel that reads its result where ``kernel`` says so."""
        own = call.copy()
        args, kwargs = pytree.tree_map(
            lambda x: self._as_input(x) if isinstance(x, torch.Tensor) else x, (own.args, own.kwargs)
        )
        with self.graph.inserting_before(before):
            result = self.graph.call_function(function, args, kwargs)
            if len(function._schema.returns) > 1:
                result = self.graph.call_function(operator.getitem, (result, 0))
            if kernel:
                result = self.graph.call_function(torch.mul, (result, 2))
        self.outputs.append(result)

    def finish(self) -> int:
        """Appends the results to the graph's outputs; returns how many those were."""
        own = self.end.args[0] if isinstance(self.end.args[0], (tuple, list)) else (self.end.args[0],)
        self.end.args = ((*own, *self.outputs),)
        return len(own)

    def _as_input(self, tensor: torch.Tensor) -> torch.fx.Node:
        with self.graph.inserting_before(self.first):
            node = self.graph.placeholder(f"beside_{len(self.given)}")
        self.given.append(tensor.requires_grad_(False))
        return node


def _copied(module: torch.fx.GraphModule) -> torch.fx.GraphModule:
    graph = torch.fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    return torch.fx.GraphModule(module, graph)


def measure(base: Arm, runs: Runs, kernels: float, subject: Subject, question: Question) -> HostCosts:
    """The host's time for the compiler's step with the calls beside it, less that without.

    Args:
        base: the compiler's arm.
        kernels: generated kernels that the op's graph has beyond the compiler's, a call.
    """
    device = subject.device
    beside: list[_Beside] = []

    def make_backend(inner: Callable[..., Any], references: Any) -> SiteBackend:
        beside.append(_Beside(inner, references, runs, kernels))
        return beside[-1]

    arm = make_arm(base.plan, subject, question.references, question.compile_options, make_backend=make_backend)
    assert arm.step is not None
    assert base.step is not None
    with base.installed(), _compat.patched(_compat.in_the_order_given()):
        for _ in range(3):
            arm.step()
        clock.synchronize(device)
        if not beside[0].made:
            return HostCosts()
        times: dict[bool, list[float]] = {False: [], True: []}
        for place in range(_ROUNDS):
            for called in (False, True) if place % 2 == 0 else (True, False):
                step = arm.step if called else base.step
                times[called].append(clock.enqueue_seconds(step, device, _BURST, bursts=1) * 1e6)
    alone, more = (float(statistics.location(np.asarray(times[called]))) for called in (False, True))
    return HostCosts(alone, max(0.0, more - alone) * beside[0].wanted / beside[0].made)
