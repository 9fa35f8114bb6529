"""A step taken apart: its kernels by who wrote them, the GPU's own time, and the host's, on the arms as they are.

Three clocks that do not know of each other: the profiler's records give the kernels (K), events around steps that were
issued ahead give the GPU's own time without the profiler (D), and the host's clock gives what it takes to issue a step
(H). D - K is what passes between kernels. The host never waits for the GPU within a step, so steps in a row take the
longer of D and H; where the two are near, what counts is how H varies from step to step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from opgraft.diagnostics.measure import clock, isolated, statistics
from opgraft.diagnostics.measure.alone import accepts
from opgraft.diagnostics.measure.arms import Arm
from opgraft.diagnostics.measure.breakdown import Shares, shares
from opgraft.diagnostics.measure.calls import Call
from opgraft.diagnostics.measure.facts import ArmFacts, FactsReading
from opgraft.diagnostics.measure.profile import Profile, record, record_turns
from opgraft.diagnostics.measure.question import Question
from opgraft.diagnostics.measure.subject import Subject
from opgraft.registry import find, resolve

ROUNDS = 7
# What is measured on the arms as they are timed, apart from counts of the compiler's.
TIMES = (
    "generated_us", "op_us", "library_us", "span_us", "enqueue_us", "step_us", "queued_us", "host_share", "paced_share",
    "launches", "replays",
)  # fmt: skip
# A GPU's queue takes about a thousand launches before the host waits.
_QUEUE_HOLDS = 600


@dataclass(frozen=True)
class Part:
    """One look at one arm; times in seconds where they are not in ``shares``."""

    shares: Shares
    enqueue: float
    step: float
    queued: float | None


def take(arms: Sequence[Arm], question: Question, subject: Subject, op_kernels: frozenset[str]) -> dict[str, ArmFacts]:
    """Times of every arm, in turns on a busy device: the median over the rounds of each."""
    device = subject.device
    backward = [s.backward for o in question.ops if (s := find(o)) is not None and s.backward is not None]
    ops = frozenset((*question.ops, *(b._schema.name for b in backward)))
    rounds: dict[str, list[Part]] = {a.name: [] for a in arms}
    counts = {}
    for arm in arms:
        with arm.installed():
            assert arm.step is not None
            one = clock.settle(arm.step, device, 0.3)
            counts[arm.name] = max(2, min(20, round(0.03 / max(one, 1e-6))))
    turns = record_turns({a.name: _installed_step(a) for a in arms}, counts, device, ROUNDS)
    for place in range(ROUNDS):
        # Each arm stands once before and once behind its neighbours: what drifts over a round hits them alike.
        for arm in arms if place % 2 == 0 else tuple(reversed(arms)):
            both = turns[arm.name][2 * place : 2 * place + 2]
            with arm.installed():
                times = _times(arm, counts[arm.name], _launches(both), device)
            rounds[arm.name] += [Part(shares(one, ops, op_kernels), *times) for one in both]
    # What interrupts a step on a shared processor only adds to it, and to each of its parts by chance.
    centre = statistics.median if device.type == "cuda" else statistics.lower_quartile
    return {name: _middle(name, found, turns[name], centre) for name, found in rounds.items() if found}


def _times(arm: Arm, count: int, launches: float, device: torch.device) -> tuple[float, float, float | None]:
    """Seconds a step: to issue it from an idle device, in a row, and on the GPU alone."""
    assert arm.step is not None
    steps = clock.steps_for(0.05 / count, device, 0.05)
    step = clock.sample(arm.step, max(steps, count), device)
    if device.type != "cuda":
        return step, step, None
    room = int(_QUEUE_HOLDS / max(launches, 1.0)) - 1
    enqueue = clock.enqueue_seconds(arm.step, device, max(1, min(4, room)))
    if room < 1:
        return enqueue, step, None
    ahead = max(1, min(room, clock.steps_for(step, device, 0.01)))
    return enqueue, step, clock.queued(arm.step, ahead, device, enqueue)


_REPLAYS = ("cudaGraphLaunch", "cuGraphLaunch")
_LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cudaMemcpyAsync", "cudaMemsetAsync", *_REPLAYS)


def _per_step(profiles: Sequence[Profile], *names: str) -> float:
    """Calls of the driver a step, by the beginning of their names."""
    return sum(r.name.startswith(names) for p in profiles for r in p.host()) / max(1, sum(p.steps for p in profiles))


def _launches(profiles: Sequence[Profile]) -> float:
    """Entries that a step puts into the device's queue: kernels of a replayed graph count too."""
    kernels = sum(len(p.device()) for p in profiles) / max(1, sum(p.steps for p in profiles))
    return max(kernels, _per_step(profiles, *_LAUNCHES))


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


def _middle(
    name: str, found: Sequence[Part], turns: Sequence[Profile], centre: Callable[[Sequence[float]], float]
) -> ArmFacts:
    def mid(values: Sequence[float]) -> float:
        return centre(list(values))

    parts = [f.shares for f in found]
    queued = [f.queued for f in found if f.queued is not None]
    return ArmFacts(
        name=name,
        generated_us=mid([p.generated_us for p in parts]),
        op_us=mid([p.op_us for p in parts]),
        library_us=mid([p.library_us for p in parts]),
        span_us=mid([p.span_us for p in parts]),
        enqueue_us=mid([f.enqueue for f in found]) * 1e6,
        step_us=mid([f.step for f in found]) * 1e6,
        # The stream could not be held in most of the rounds: the few where it seemed to be are no measure.
        queued_us=mid(queued) * 1e6 if 2 * len(queued) > len(found) else 0.0,
        kernels={k: mid([p.kernels[k] for p in parts]) for k in parts[0].kernels},
        launches=_per_step(turns, *_LAUNCHES),
        replays=_per_step(turns, *_REPLAYS),
    )


def op_kernels(calls: Sequence[Call], question: Question, device: torch.device, train: bool) -> frozenset[str]:
    """Names of the device kernels that the ops launch, forward and backward."""
    if device.type != "cuda":
        return frozenset()
    names: set[str] = set()
    for call in calls:
        forms = [form_of(call, question), *(s.function for s in question.raw if accepts(s, call, train))]
        for form in forms:
            for backward in {False, train}:
                turn = isolated.once(form, call, backward)
                turn()
                names |= {r.name for r in record(turn, device).device() if r.kind == "kernel"}
    # Kernels of torch itself (a fill, a copy) may be part of an op; they are too common to be told by.
    return frozenset(n for n in names if "at::native" not in n and not n.startswith("triton_"))


def form_of(call: Call, question: Question) -> Callable[..., Any]:
    """What stands at the call's site: the op, or the unregistered function."""
    swap = next((s for s in question.swapped if s.label == call.op), None)
    return swap.present if swap is not None else resolve(call.op)


def merged(takes: Sequence[Sequence[ArmFacts]]) -> dict[str, ArmFacts]:
    """The times of several processes as one: the median of each, over the processes that have the arm."""
    found: dict[str, list[ArmFacts]] = {}
    for taken in takes:
        for one in taken:
            found.setdefault(one.name, []).append(one)
    return {name: _join(same) for name, same in found.items()}


def with_times(facts: FactsReading, takes: Sequence[Sequence[ArmFacts]]) -> FactsReading:
    """The compiler's counts beside times that were taken where the steps were timed, where there are such times."""
    times = merged(takes)
    if not times:
        return facts
    arms = tuple(
        msgspec.structs.replace(a, kernels=t.kernels, failed="", **{field: getattr(t, field) for field in TIMES})
        if (t := times.get(a.name)) is not None
        else a
        for a in facts.arms
    )
    return msgspec.structs.replace(facts, arms=arms)


def _join(found: Sequence[ArmFacts]) -> ArmFacts:
    def mid(field: str) -> float:
        return statistics.median([getattr(f, field) for f in found])

    kernels = {k: statistics.median([f.kernels.get(k, 0.0) for f in found]) for k in found[0].kernels}
    joined = ArmFacts(name=found[0].name, kernels=kernels)
    return msgspec.structs.replace(joined, **{field: mid(field) for field in TIMES})
