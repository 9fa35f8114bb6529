"""A host that issues kernels and a GPU that runs them, simulated: what every clock of the measurement would read."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from opgraft.diagnostics.measure.clock import Issued, paced
from opgraft.diagnostics.measure.facts import ArmFacts


@dataclass(frozen=True)
class Launch:
    """One kernel: host microseconds before it is issued, microseconds that it runs, and who wrote it."""

    host: float
    kernel: float
    sort: str = "generated"


@dataclass(frozen=True)
class Machine:
    """Microseconds between two kernels in a queue, from issue to start at an idle device, and the queue's room."""

    gap: float = 0.9
    latency: float = 4.0
    room: int = 1000
    jitter: float = 0.0


def timed(step: Sequence[Launch], steps: int, machine: Machine, seed: int = 0) -> tuple[float, Issued]:
    """Microseconds a step by events at the device, and how the host issued the steps, behind one that went ahead."""
    chance = random.Random(seed)
    now, free, starts = 0.0, 0.0, []
    begin = first = 0.0
    issued = []
    for index in range(steps + 1):
        if index == 1:
            begin, first = now, free
        for launch in step:
            now += launch.host * (1 + machine.jitter * (chance.expovariate(1.0) - 1.0))
            if len(starts) >= machine.room:
                now = max(now, starts[len(starts) - machine.room])
            starts.append(max(now + machine.latency, free + machine.gap))
            free = starts[-1] + launch.kernel
        if index:
            issued.append((index, now - begin))
    return (free - first) / steps, tuple(issued)


def facts(name: str, step: Sequence[Launch], machine: Machine, steps: int = 100) -> tuple[ArmFacts, float]:
    """What the measurement would know of an arm, and the step that events would give."""
    took, issued = timed(step, steps, machine, seed=1)
    kernels = {sort: float(sum(x.sort == sort for x in step)) for sort in ("generated", "op", "library")}
    times = {sort: sum(x.kernel for x in step if x.sort == sort) for sort in kernels}
    burst = sum(x.host for x in step)
    queued = sum(x.kernel + machine.gap for x in step)
    return (
        ArmFacts(
            name=name,
            generated_us=times["generated"],
            op_us=times["op"],
            library_us=times["library"],
            span_us=max(took, 1.3 * burst),
            enqueue_us=burst,
            step_us=took,
            queued_us=queued,
            host_share=issued[-1][1] / steps / took,
            paced_share=paced(issued, queued) / took,
            kernels=kernels,
            launches=float(len(step)),
        ),
        took,
    )
