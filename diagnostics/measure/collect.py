"""Collects the facts of a comparison in one process: scheduler nodes, kernel records, host time, the op alone."""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch.utils import _pytree as pytree

from opgraft.diagnostics.measure import _compat, checks, clock, isolated, statistics
from opgraft.diagnostics.measure.alone import accepts, named
from opgraft.diagnostics.measure.arms import BASELINE, Arm, make_arm, plan_arms
from opgraft.diagnostics.measure.breakdown import Shares, shares
from opgraft.diagnostics.measure.calls import Call
from opgraft.diagnostics.measure.facts import ArmFacts, FactsBackend, FactsReading, Recorder
from opgraft.diagnostics.measure.profile import record, record_turns
from opgraft.diagnostics.measure.question import Progress, Question
from opgraft.diagnostics.measure.subject import Subject, floating_in, tensors_in
from opgraft.registry import find, resolve

_ROUNDS = 7


def collect(
    subject: Subject,
    question: Question,
    progress: Progress | None = None,
    only: frozenset[str] | None = None,
) -> FactsReading:
    """Compiles the arms again with caches off and takes a step of each apart.

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
    op_kernels = _op_kernels(calls, question, device, subject.train)
    tell("timing the op alone", 0.65)
    alone, reference, copy_rate = _alone(calls, question, subject)
    tell("taking the steps apart", 0.8)
    alive = [a for a in arms if not a.failed]
    taken = _interleaved(alive, question, subject, op_kernels)
    facts = tuple(_facts_of(arm, recorders[arm.name], taken.get(arm.name), segments[arm.name], subject) for arm in arms)
    host = (
        isolated.host_us(_form(calls[0], question), calls[0], device, False) if calls and device.type == "cuda" else 0.0
    )
    ideal = sum(
        int(spec.cost(*c.args, **c.kwargs).bytes) * c.count
        for c in calls
        if (spec := find(c.op)) is not None and spec.cost is not None
    )
    tell("done", 1.0)
    return FactsReading(
        arms=facts,
        reference=reference,
        alone_us=alone,
        host_us_per_call=host,
        copy_bytes_per_second=copy_rate,
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


def _op_kernels(calls: Sequence[Call], question: Question, device: torch.device, train: bool) -> frozenset[str]:
    """Names of the device kernels that the ops launch, forward and backward."""
    if device.type != "cuda":
        return frozenset()
    names: set[str] = set()
    for call in calls:
        forms = [_form(call, question), *(s.function for s in question.raw if accepts(s, call, train))]
        for form in forms:
            for backward in {False, train}:
                turn = isolated.once(form, call, backward)
                turn()
                names |= {r.name for r in record(turn, device).device() if r.kind == "kernel"}
    # Kernels of torch itself (a fill, a copy) may be part of an op; they are too common to be told by.
    return frozenset(n for n in names if "at::native" not in n and not n.startswith("triton_"))


def _form(call: Call, question: Question) -> Callable[..., Any]:
    swap = next((s for s in question.swapped if s.label == call.op), None)
    return swap.present if swap is not None else resolve(call.op)


def _alone(
    calls: Sequence[Call], question: Question, subject: Subject
) -> tuple[dict[str, float], ArmFacts | None, float]:
    """A step's calls of the ops and of their compiled references alone, and what the references consist of."""
    device = subject.device
    copy_rate = isolated.copy_bandwidth(device)
    if not calls:
        return {}, None, copy_rate
    totals: dict[str, float] = {}
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
        forms = {"op": _form(call, question), BASELINE: compiled}
        if swap is not None:
            forms["raw"] = forms["op"]
        elif len(question.raw) == 1 and accepts(question.raw[0], call, subject.train):
            forms["raw"] = question.raw[0].function
        share = question.alone_seconds / len(calls)
        for name, one in isolated.measure_alone(forms, [call], device, subject.train, share).items():
            totals[name] = totals.get(name, 0.0) + one.us_per_step
    return totals, ArmFacts(name="reference", nodes=tuple(recorder.nodes), runs=tuple(runs)), copy_rate


def _interleaved(
    arms: Sequence[Arm], question: Question, subject: Subject, op_kernels: frozenset[str]
) -> dict[str, tuple[Shares, float, float]]:
    """Profiles the arms in turns on a busy device; medians over the rounds of every share, enqueue and step time."""
    device = subject.device
    backward = [s.backward for o in question.ops if (s := find(o)) is not None and s.backward is not None]
    ops = frozenset((*question.ops, *(b._schema.name for b in backward)))
    rounds: dict[str, list[tuple[Shares, float, float]]] = {a.name: [] for a in arms}
    counts = {}
    for arm in arms:
        with arm.installed():
            assert arm.step is not None
            one = clock.settle(arm.step, device, 0.3)
            counts[arm.name] = max(2, min(20, round(0.03 / max(one, 1e-6))))
    turns = record_turns({a.name: _installed_step(a) for a in arms}, counts, device, _ROUNDS)
    for place in range(_ROUNDS):
        for arm in arms:
            with arm.installed():
                assert arm.step is not None
                steps = clock.steps_for(0.05 / counts[arm.name], device, 0.05)
                busy = clock.sample(arm.step, max(steps, counts[arm.name]), device)
                enqueue = _enqueue(arm.step, device) if device.type == "cuda" else busy
            for taken in turns[arm.name][2 * place : 2 * place + 2]:
                rounds[arm.name].append((shares(taken, ops, op_kernels), enqueue, busy))
    return {name: _middle(found) for name, found in rounds.items() if found}


def _installed_step(arm: Arm) -> Callable[[], Any]:
    """The arm's step with its swaps held around it: for turns of several arms in one profile."""
    assert arm.step is not None
    if not arm.plan.swaps:
        return arm.step
    step = arm.step

    def held() -> Any:
        with arm.installed():
            return step()

    return held


def _enqueue(step: Callable[[], Any], device: torch.device, steps: int = 4) -> float:
    """Host seconds a step, steps in a row from an idle device: few enough that its queue does not fill."""
    clock.synchronize(device)
    begin = time.perf_counter_ns()
    for _ in range(steps):
        step()
    took = (time.perf_counter_ns() - begin) * 1e-9 / steps
    clock.synchronize(device)
    return took


def _middle(found: Sequence[tuple[Shares, float, float]]) -> tuple[Shares, float, float]:
    def mid(values: list[float]) -> float:
        return statistics.median(values)

    parts = [f[0] for f in found]
    kernels = {k: mid([p.kernels[k] for p in parts]) for k in parts[0].kernels}
    middle = Shares(
        mid([p.generated_us for p in parts]),
        mid([p.op_us for p in parts]),
        mid([p.library_us for p in parts]),
        mid([p.span_us for p in parts]),
        kernels,
    )
    return middle, mid([f[1] for f in found]), mid([f[2] for f in found])


def _facts_of(
    arm: Arm, recorder: Recorder, taken: tuple[Shares, float, float] | None, segments: tuple[int, ...], subject: Subject
) -> ArmFacts:
    if arm.failed or taken is None:
        return ArmFacts(name=arm.name, failed=arm.failed or "not profiled")
    part, enqueue, step = taken
    return ArmFacts(
        name=arm.name,
        nodes=tuple(recorder.nodes),
        runs=_runs(arm),
        generated_us=part.generated_us,
        op_us=part.op_us,
        library_us=part.library_us,
        span_us=part.span_us,
        enqueue_us=enqueue * 1e6,
        step_us=step * 1e6,
        kernels=part.kernels,
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
