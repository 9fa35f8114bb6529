"""Readings of all processes, and the facts where they were taken, put together as a report."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import torch

import opgraft
from opgraft.diagnostics.measure import (
    apart,
    call_overhead,
    invalid_measurement,
    kernel_not_run,
    lost_fusion,
    no_gain,
    outcome,
    prediction,
    prose,
)
from opgraft.diagnostics.measure import ledger as ledger_of
from opgraft.diagnostics.measure.arms import BASELINE, TWIN
from opgraft.diagnostics.measure.facts import FactsReading
from opgraft.diagnostics.measure.readings import Problem, Reading
from opgraft.diagnostics.model import ArmResult, Comparison, Finding, Ledger, Location, Report

VERSION = getattr(opgraft, "__version__", "unknown")


def report_of(
    readings: Sequence[Reading],
    where: Location,
    stopped: str,
    facts: FactsReading | None = None,
    more: Sequence[Problem] = (),
    *,
    predict: bool = False,
) -> Report:
    """One report from at least one reading.

    Args:
        where: the place of findings that concern the whole measurement.
        stopped: why no more was measured, in words.
        more: problems of processes that left no reading.
    """
    problems = invalid_measurement.notes([*more, *(p for r in readings for p in r.problems)])
    rows = outcome.table(readings, problems)
    first = readings[0]
    found = outcome.intervals(readings)
    noise = found.get(TWIN)
    effects = [i.mde for name, i in found.items() if name not in (TWIN, "eager")]
    if facts is not None:
        facts = apart.with_times(facts, [r.apart for r in readings])
    ledgers = make_ledgers(rows, facts, first)
    on_gpu = first.device.startswith("cuda")
    comparison = Comparison(
        arms=with_counts(rows, facts),
        ops=tuple(first.alone) or tuple(dict.fromkeys(s.op for s in first.sites)),
        noise_low=math.exp(noise.low) if noise else None,
        noise_high=math.exp(noise.high) if noise else None,
        smallest_effect=max(effects) if effects else None,
        copy_bytes_per_second=first.copy_bytes_per_second,
        kernel_share_of_copy=share_of_copy(first),
        ledgers=ledgers,
        predictions=prediction.predict(rows, facts, on_gpu=on_gpu) if predict and facts is not None else (),
        stopped_because=stopped,
        environment=environment_of(readings),
    )
    comparison = prose.with_sentence(comparison, _calls(first), problems)
    degraded = [] if first.copy_bytes_per_second else ["isolated times"]
    return Report(
        opgraft=VERSION,
        torch=first.environment.get("torch", str(torch.__version__)),
        device=first.device,
        findings=tuple(findings_of(rows, first, facts, problems, where, ledgers)),
        ledger=comparison,
        degraded=(*degraded, *(facts.degraded if facts is not None else ())),
    )


def nothing_of(problems: Sequence[Problem], where: Location, stopped: str) -> Report:
    """The report where no process came back: the reason is its finding."""
    reason = problems[0].message if problems else stopped
    return Report(
        opgraft=VERSION,
        torch=str(torch.__version__),
        device="unknown",
        findings=tuple(invalid_measurement.find(p, where) for p in problems),
        ledger=Comparison(arms=(), stopped_because=stopped, sentence=f"Nothing was measured: {reason}."),
    )


def make_ledgers(rows: Sequence[ArmResult], facts: FactsReading | None, reading: Reading) -> tuple[Ledger, ...]:
    """A ledger for every arm that runs all ops, the registered arm first."""
    baseline = next((r for r in rows if r.name == BASELINE), None)
    if facts is None or baseline is None or baseline.step_us is None:
        return ()
    found = []
    for row in rows:
        if row.name not in ("op", "raw") or row.step_us is None or row.ratio is None:
            continue
        # The paired ratio is surer than the difference of two medians.
        own = baseline.step_us / row.ratio
        on_gpu = reading.device.startswith("cuda")
        one = ledger_of.make(row.name, facts, baseline.step_us, own, on_gpu=on_gpu, breaks=row.breaks or 0)
        if one is not None:
            found.append(one)
    return tuple(found)


def with_counts(rows: Sequence[ArmResult], facts: FactsReading | None) -> tuple[ArmResult, ...]:
    """Kernels a step from the facts where the timed run could not count them (a CPU has no kernel records)."""
    if facts is None:
        return tuple(rows)

    def count(row: ArmResult) -> int | None:
        known = facts.arm(row.name)
        return row.launches if row.launches is not None or known is None else round(sum(known.kernels.values()))

    return tuple(msgspec.structs.replace(r, launches=count(r)) for r in rows)


def _calls(reading: Reading) -> int:
    forms = [by_form.get("op") or by_form.get("raw") for by_form in reading.alone.values()]
    return sum(f.calls for f in forms if f is not None)


def share_of_copy(reading: Reading) -> float | None:
    """Bytes an ideal kernel moves over the time ours takes, as a share of the copy in the same process."""
    if not reading.copy_bytes_per_second or reading.train:
        return None
    timed = [(op, forms["op"]) for op, forms in reading.alone.items() if "op" in forms and reading.ideal_bytes.get(op)]
    if not timed:
        return None
    moved = sum(reading.ideal_bytes[op] for op, _ in timed)
    return moved / (sum(a.us_per_step for _, a in timed) * 1e-6) / reading.copy_bytes_per_second


def environment_of(readings: Sequence[Reading]) -> dict[str, str]:
    """What the figures were taken on, and under which clocks."""
    first = readings[0]
    blocks = [b for r in readings if r.series is not None for b in r.series.blocks]
    found = dict(first.environment)
    found["dtype"] = first.dtype
    found["step"] = "forward, backward, optimiser" if first.train else "forward"
    found["processes"] = str(len(readings))
    found["blocks"] = str(len(blocks))
    if dropped := sum(r.series.dropped for r in readings if r.series is not None):
        found["blocks done again"] = str(dropped)
    for name, unit, values in (
        ("SM clock", "MHz", [b.conditions.sm_mhz for b in blocks]),
        ("temperature", "C", [b.conditions.celsius for b in blocks]),
        ("power", "W", [b.conditions.watts for b in blocks]),
    ):
        known = [v for v in values if v]
        if known:
            found[name] = f"{min(known):.0f} to {max(known):.0f} {unit}"
    if reasons := sorted({reason for b in blocks for reason in b.conditions.reasons}):
        found["clocks held down by"] = ", ".join(reasons)
    return found


def findings_of(
    rows: Sequence[ArmResult],
    reading: Reading,
    facts: FactsReading | None,
    problems: Sequence[Problem],
    where: Location,
    ledgers: Sequence[Ledger],
) -> list[Finding]:
    found: list[Finding] = []
    for problem in problems:
        places = [s.location for s in reading.sites if s.op == problem.op] or [where]
        if problem.about in ("op-not-run", "op-still-runs", "no-site"):
            found.append(kernel_not_run.find(problem, places))
        else:
            found.append(invalid_measurement.find(problem, places[0]))
    baseline = next((r for r in rows if r.name == BASELINE), None)
    names = [op for op, forms in reading.alone.items() if "op" in forms]
    for op in names if baseline is not None else ():
        row = "op" if len(names) == 1 else f"op {op}"
        arm = next((r for r in rows if r.name == row), None)
        places = [s.location for s in reading.sites if s.op == op]
        if arm is None or not places or baseline is None:
            continue
        ledger = next((x for x in ledgers if x.arm == row), None)
        found += _against(op, baseline, arm, reading, facts, ledger, places)
    order = {"error": 0, "warning": 1, "note": 2}
    return sorted(found, key=lambda f: (order[f.severity], -(f.cost.us_per_step or 0.0)))


def _against(
    op: str,
    baseline: ArmResult,
    arm: ArmResult,
    reading: Reading,
    facts: FactsReading | None,
    ledger: Ledger | None,
    places: Sequence[Location],
) -> list[Finding]:
    """What speaks against one op. Lost fusion stands as a finding of its own where ``no-gain`` does not hold it."""
    form = reading.alone[op]["op"]
    gain = no_gain.find(op, baseline, arm, form.calls, ledger, places)
    fusion = None
    if gain is None and ledger is not None and baseline.step_us and arm.verdict not in ("FASTER", None):
        fusion = lost_fusion.find(op, ledger, baseline.step_us, form.calls, reading.copy_bytes_per_second, places)
    known = facts.arm(arm.name) if facts is not None else None
    on_gpu = reading.device.startswith("cuda")
    busy = known.kernel_us / known.step_us if known is not None and known.step_us and on_gpu else None
    own = reading.arm(arm.name)
    called = round(own.op_calls.get(op, 0.0)) if own is not None else 0
    boundary = call_overhead.find(op, form.host_us_per_call, called, arm.step_us, busy, on_gpu, places)
    return [one for one in (gain, fusion, boundary) if one is not None]
