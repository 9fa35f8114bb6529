"""Collects the facts of a comparison in one process: scheduler nodes, kernel records, host time, the op alone."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec
import torch
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

from opgraft.diagnostics.measure import _compat, apart, checks, clock, host_costs, isolated, prices
from opgraft.diagnostics.measure.alone import accepts, named
from opgraft.diagnostics.measure.apart import form_of
from opgraft.diagnostics.measure.arms import BASELINE, Arm, make_arm, plan_arms
from opgraft.diagnostics.measure.calls import Call, dispatched
from opgraft.diagnostics.measure.facts import ArmFacts, FactsBackend, FactsReading, Recorder
from opgraft.diagnostics.measure.host_costs import HostCosts
from opgraft.diagnostics.measure.question import Progress, Question
from opgraft.diagnostics.measure.subject import Subject, floating_in, tensors_in
from opgraft.registry import find


def collect(
    subject: Subject,
    question: Question,
    progress: Progress | None = None,
    only: frozenset[str] | None = None,
) -> FactsReading:
    """Compiles the arms again with caches off, and on a CPU takes a step of each apart.

    Args:
        only: names of arms; by default the baseline and every arm that runs the op.
    """
    tell = progress or (lambda message, share: None)
    device = subject.device
    plans = [
        p
        for p in plan_arms(question.ops, question.swapped, question.raw, question.wanted)
        if p.compiled and not p.twin and (only is None or p.name in only)
    ]
    recorders: dict[str, Recorder] = {}
    segments: dict[str, tuple[int, ...]] = {}
    arms: list[Arm] = []
    degraded: list[str] = []
    for index, plan in enumerate(plans):
        tell(f"compiling {plan.name} again, caches off", 0.6 * index / len(plans))
        recorder = Recorder()
        settings = _compat.scheduler_hook(recorder)
        if not settings:
            degraded.append("bytes and kernels of the compiled graphs")
        arm = make_arm(
            plan,
            subject,
            question.references,
            question.compile_options,
            make_backend=partial(FactsBackend, recorder=recorder),
        )
        recorders[plan.name] = recorder
        before = _compat.cuda_graph_counts()
        try:
            with arm.installed(), _compat.patched(settings), _without_the_note_on_caches():
                assert arm.step is not None
                for _ in range(3):
                    arm.step()
                clock.synchronize(device)
        except Exception as error:  # the timing run has said so already; here the arm only gets no facts
            arm.failed = f"{type(error).__name__}"
        segments[plan.name] = tuple(now - then for now, then in zip(_compat.cuda_graph_counts(), before, strict=True))
        arms.append(arm)
    tell("recording the calls of the op", 0.62)
    calls = checks.recorded_calls(subject, question, [])
    tell("timing the op alone", 0.65)
    alone, reference = _alone(calls, question, subject)
    # On a GPU the arms are taken apart where they are timed. On a CPU that needs kernels with names, which the arms of
    # this process alone have.
    taken: dict[str, ArmFacts] = {}
    if device.type != "cuda":
        tell("taking the steps apart", 0.8)
        taken = apart.take([a for a in arms if not a.failed], question, subject, frozenset())
    facts = tuple(
        _facts_of(arm, recorders[arm.name], taken.get(arm.name, ArmFacts(name=arm.name)), segments[arm.name], subject)
        for arm in arms
    )
    tell("pricing kernels and launches", 0.9)
    on_gpu = device.type == "cuda"
    base = next((a for a in arms if a.name == BASELINE and not a.failed), None)
    costs = _host_costs(base, facts, calls, question, subject) if on_gpu else HostCosts()
    if on_gpu and calls and not costs.step_us:
        degraded.append("host time of the op's calls")
    ideal = sum(
        int(spec.cost(*c.args, **c.kwargs).bytes) * c.count
        for c in calls
        if (spec := find(c.op)) is not None and spec.cost is not None
    )
    tell("done", 1.0)
    return FactsReading(
        arms=facts,
        reference=reference,
        alone_us=alone.cold,
        in_place_us=alone.in_place,
        host_us_of_calls=costs.more_us,
        host_us_of_step=costs.step_us,
        copy_bytes_per_second=isolated.copy_bandwidth(device),
        prices=_prices(device) if on_gpu else prices.Prices(),
        ideal_bytes=ideal,
        calls=sum(c.count for c in calls),
        degraded=tuple(dict.fromkeys(degraded)),
    )


@contextlib.contextmanager
def _without_the_note_on_caches() -> Iterator[None]:
    """torch warns that a cache is off: here that is meant."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="dynamo_pgo force disabled")
        yield


@dataclass
class _Alone:
    """A step's calls of each form alone: microseconds cold and in place."""

    cold: dict[str, float] = field(default_factory=dict)
    in_place: dict[str, float] = field(default_factory=dict)


def _alone(calls: Sequence[Call], question: Question, subject: Subject) -> tuple[_Alone, ArmFacts | None]:
    """A step's calls of the ops and of their compiled references alone, and what the references consist of."""
    device = subject.device
    total = _Alone()
    if not calls:
        return total, None
    recorder = Recorder()
    settings = _compat.scheduler_hook(recorder)
    runs: list[float] = []
    for call in calls:
        swap = next((s for s in question.swapped if s.label == call.op), None)
        reference = swap.function if swap is not None else question.references[call.op]
        compiled = torch.compile(named(reference), **isolated.without_graphs(question.compile_options))
        recorder.graph = len(runs)
        runs.append(float(call.count))
        with _compat.patched(settings), _without_the_note_on_caches():
            isolated.once(compiled, call.copy(), subject.train)()
        forms = {"op": form_of(call, question), BASELINE: compiled}
        if swap is not None:
            forms["raw"] = forms["op"]
        elif len(question.raw) == 1 and accepts(question.raw[0], call, subject.train):
            forms["raw"] = question.raw[0].function
        share = question.alone_seconds / len(calls)
        for name, one in isolated.measure_alone(forms, [call], device, subject.train, share).items():
            total.cold[name] = total.cold.get(name, 0.0) + one.us_per_step
        for name, us in isolated.in_place_us(forms, call, device, subject.train).items():
            total.in_place[name] = total.in_place.get(name, 0.0) + us
    return total, ArmFacts(name="reference", nodes=tuple(recorder.nodes), runs=tuple(runs))


def _host_costs(
    base: Arm | None, facts: Sequence[ArmFacts], calls: Sequence[Call], question: Question, subject: Subject
) -> HostCosts:
    """Host time of what the op's graph calls beyond the compiler's; nothing where it cannot be had."""
    own, other = (next((f for f in facts if f.name == name and not f.failed), None) for name in ("op", BASELINE))
    if base is None or own is None or other is None or not calls:
        return HostCosts()
    number = sum(c.count for c in calls)
    kernels = max(0.0, own.count() - other.count() - own.count("op")) / number
    try:
        runs: dict[str, list[tuple[OpOverload, Call]]] = {}
        # Of an op that is called in several ways, the most frequent one.
        for call in sorted(calls, key=lambda c: -c.count):
            turn = isolated.once(form_of(call, question), call, subject.train)
            runs.setdefault(call.op, list(dispatched(turn).values()))
        with _without_the_note_on_caches():
            return host_costs.measure(base, runs, kernels, subject, question)
    except Exception:  # only a prediction needs it
        return HostCosts()


def _prices(device: torch.device) -> prices.Prices:
    """What kernels cost by bytes; nothing where there is no room to find out."""
    try:
        return prices.measure(device)
    except Exception:  # only a prediction needs them
        return prices.Prices()


def _facts_of(arm: Arm, recorder: Recorder, taken: ArmFacts, segments: tuple[int, ...], subject: Subject) -> ArmFacts:
    if arm.failed:
        return ArmFacts(name=arm.name, failed=arm.failed)
    return msgspec.structs.replace(
        taken,
        nodes=tuple(recorder.nodes),
        runs=_runs(arm),
        partitions=segments[0],
        skips=segments[1],
        saved_bytes=_saved_bytes(arm, subject) if subject.train else 0,
    )


def _runs(arm: Arm) -> tuple[float, ...]:
    """Runs of each graph in one step."""
    backend = arm.backend
    if not isinstance(backend, FactsBackend) or arm.step is None:
        return ()
    before = list(backend.executions)
    with arm.installed():
        arm.step()
    return tuple(float(now - then) for now, then in zip(backend.executions, before, strict=False))


def _saved_bytes(arm: Arm, subject: Subject) -> int:
    """Memory that the arm's forward leaves for its backward: tensors saved by the nodes of the autograd graph."""
    assert arm.entry is not None
    with arm.installed():
        outputs = [t for t in floating_in(arm.entry(*subject.args, **subject.kwargs)) if t.grad_fn is not None]
    kept = {t.untyped_storage().data_ptr() for t in [*subject.parameters, *tensors_in((subject.args, subject.kwargs))]}
    sizes: dict[int, int] = {}
    seen: set[Any] = set()
    waiting = [t.grad_fn for t in outputs]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        for tensor in pytree.tree_leaves(getattr(node, "saved_tensors", ())):
            if isinstance(tensor, torch.Tensor):
                pointer = tensor.untyped_storage().data_ptr()
                if pointer not in kept:
                    sizes[pointer] = tensor.untyped_storage().nbytes()
        waiting.extend(follow for follow, _ in node.next_functions)
    return sum(sizes.values())
