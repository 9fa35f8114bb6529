"""Readings of one or many processes joined into the table of arms: intervals, verdicts, and what withholds them."""

from __future__ import annotations

import math
from collections.abc import Sequence

from opgraft.diagnostics.measure import statistics
from opgraft.diagnostics.measure.arms import BASELINE, TWIN
from opgraft.diagnostics.measure.readings import AloneReading, ArmReading, Problem, Reading
from opgraft.diagnostics.measure.statistics import Interval
from opgraft.diagnostics.model import ArmResult, Verdict


def intervals(readings: Sequence[Reading]) -> dict[str, Interval]:
    """The paired log-ratio of every arm to the baseline, over the processes that measured both."""
    names = {name for r in readings if r.series for b in r.series.blocks for name in b.seconds}
    found = {}
    for name in sorted(names - {BASELINE}):
        one = statistics.interval([r.series.ratios(name, BASELINE) for r in readings if r.series is not None])
        if one is not None:
            found[name] = one
    return found


def withheld(problems: Sequence[Problem], name: str) -> bool:
    """Whether an arm gets no verdict: something voids it, the baseline, or the whole run."""
    return any(p.voids and p.arm in ("", name, BASELINE) for p in problems)


def verdicts(found: dict[str, Interval], problems: Sequence[Problem], claimed: Sequence[str]) -> dict[str, Verdict]:
    """Verdicts of the arms in ``claimed``; several claims are corrected together."""
    noise = found.get(TWIN)
    open_claims = [n for n in claimed if n in found and not withheld(problems, n)]
    adjusted = statistics.holm({n: found[n].p for n in open_claims})
    return {n: statistics.verdict(found[n], adjusted[n], noise) for n in open_claims}


def table(readings: Sequence[Reading], problems: Sequence[Problem]) -> tuple[ArmResult, ...]:
    """One row an arm, in the order of the plans, without the A/A arm (it is the noise floor)."""
    first = readings[0]
    found = intervals(readings)
    names = [a.name for a in first.arms if a.name != TWIN]
    decided = verdicts(found, problems, [n for n in names if n not in (BASELINE, "eager")])
    return tuple(_row(name, readings, found.get(name), decided.get(name)) for name in names)


def _row(name: str, readings: Sequence[Reading], ratio: Interval | None, verdict: Verdict | None) -> ArmResult:
    arms = [a for r in readings if (a := r.arm(name)) is not None]
    first = arms[0]
    step = step_interval(readings, name)
    alone = alone_of(readings, name)
    baseline = next((a for a in readings[0].arms if a.name == BASELINE), None)
    return ArmResult(
        name=name,
        isolated_us=alone.us_per_step / max(1, alone.calls) if alone else None,
        host_us=alone.host_us_per_call if alone else None,
        step_us=step[0] if step else None,
        step_low=step[1] if step else None,
        step_high=step[2] if step else None,
        ratio=math.exp(ratio.estimate) if ratio else None,
        ratio_low=math.exp(ratio.low) if ratio else None,
        ratio_high=math.exp(ratio.high) if ratio else None,
        verdict=verdict,
        breaks=breaks_of(first),
        graphs=round(first.regions) if first.regions else first.graphs,
        launches=None if first.launches is None else round(first.launches),
        max_error=first.error,
        reference_error=baseline.error if baseline is not None else None,
        failed=next((a.failed for a in arms if a.failed), ""),
    )


def breaks_of(arm: ArmReading) -> int | None:
    """Gaps in eager between the graphs that a step runs; by graphs compiled where no profile was taken."""
    if arm.graphs is None:
        return None
    entered = arm.regions if arm.regions else arm.graphs
    return max(0, round(entered) - 1) if arm.graphs else None


def step_interval(readings: Sequence[Reading], name: str) -> tuple[float, float, float] | None:
    """Microseconds a step with a 95 % interval."""
    logs = [[b.log(name) for b in r.series.blocks if name in b.seconds] for r in readings if r.series is not None]
    found = statistics.level([one for one in logs if one])
    return None if found is None else (math.exp(found[0]) * 1e6, math.exp(found[1]) * 1e6, math.exp(found[2]) * 1e6)


def alone_of(readings: Sequence[Reading], name: str) -> AloneReading | None:
    """The isolated time that stands in an arm's row: its form of the ops, all ops of the arm together."""
    form = {"op": "op", "raw": "raw", BASELINE: BASELINE}.get(name)
    only = name.removeprefix("op ") if name.startswith("op ") else None
    forms = []
    for op, by_form in readings[0].alone.items():
        wanted = "op" if only == op else BASELINE if only else form
        if wanted in by_form:
            forms.append(by_form[wanted])
    if not forms or (form is None and only is None):
        return None
    hosts = [f.host_us_per_call for f in forms if f.host_us_per_call is not None]
    return AloneReading(
        us_per_step=sum(f.us_per_step for f in forms),
        calls=sum(f.calls for f in forms),
        cold=all(f.cold for f in forms),
        host_us_per_call=sum(hosts) / len(hosts) if hosts else None,
    )
