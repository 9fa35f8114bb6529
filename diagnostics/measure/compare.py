"""``compare``: is the kernel worth it in the model? Arms, checks, interleaved times, verdicts, and the reasons."""

from __future__ import annotations

import inspect
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

import opgraft
from opgraft.diagnostics.measure import (
    invalid_measurement,
    kernel_not_run,
    no_gain,
    ops,
    outcome,
    prose,
    session,
    statistics,
)
from opgraft.diagnostics.measure.arms import BASELINE, TWIN
from opgraft.diagnostics.measure.blocks import Block
from opgraft.diagnostics.measure.readings import Problem, Reading
from opgraft.diagnostics.measure.subject import Subject, subject_of
from opgraft.diagnostics.measure.swap import Swap
from opgraft.diagnostics.model import ArmResult, Comparison, Finding, Ledger, Location, Report

__all__ = ["Swap", "compare"]

Progress = Callable[[str, float], None]


def compare(
    model: Callable[..., Any],
    inputs: Any = (),
    ops: Sequence[Any] = (),
    *,
    arms: Sequence[str] | None = None,
    raw: Swap | Sequence[Swap] | None = None,
    references: Mapping[Any, Callable[..., Any]] | None = None,
    train: bool = False,
    loss: Callable[[Any], torch.Tensor] | None = None,
    optimizer: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer] | None = None,
    seconds: float = 60.0,
    compile_options: Mapping[str, Any] | None = None,
    device: torch.device | str | None = None,
    progress: Progress | None = None,
) -> Report:
    """Times a model with its custom ops against the same model with their references, and says why they differ.

    The model is not edited: both sides are compiled from it, and differ at the ops' call sites alone.

    Args:
        model: an ``nn.Module`` or a function that calls the ops.
        inputs: one batch: a tensor, a tuple of arguments, or a dict of keyword arguments.
        ops: names (``"ns::op"``), overloads, public functions, or ``Swap(module, "name", reference)`` for a function
            that is not registered. By default every op with a record that the model calls.
        arms: names of the arms to run beside ``compiler``, of ``eager``, ``op``, ``op ns::name``, ``raw``.
        raw: the unregistered form of an op, as ``Swap(module, "name", kernel)``: becomes the arm ``raw``.
        references: plain torch for ops without a record, or in place of the record's.
        train: a step is forward, backward and optimiser step; else forward under ``no_grad``.
        loss: takes the output to a scalar. By default every output gets a fixed random gradient.
        optimizer: takes the parameters to an optimiser; plain SGD by default. Its learning rate is set to 0.
        seconds: time for timing, beside what compiling takes.
        compile_options: keyword arguments of ``torch.compile`` for every arm.
        device: where to run; where the model is, by default.
        progress: called with a message and the share done.

    Returns:
        A report whose ``ledger`` is the comparison and whose findings say what stands against the kernel or against
        the measurement.

    Raises:
        TypeError, LookupError, ValueError: the model, an op or an arm is not what it has to be.
    """
    subject = subject_of(model, inputs, train=train, loss=loss, optimizer=optimizer, device=device)
    question = make_question(subject, ops, arms, raw, references, compile_options, seconds)
    reading = session.run(subject, question, progress, enough=_enough)
    stopped = _stopped(reading, question, seconds)
    return report_of([reading], question, fallback_location(subject), stopped)


def make_question(
    subject: Subject,
    wanted_ops: Sequence[Any],
    arms: Sequence[str] | None,
    raw: Swap | Sequence[Swap] | None,
    references: Mapping[Any, Callable[..., Any]] | None,
    compile_options: Mapping[str, Any] | None,
    seconds: float,
) -> session.Question:
    names, swapped = ops.split(wanted_ops)
    if not names and not swapped:
        names = ops.discover(subject)
    return session.Question(
        ops=names,
        references=ops.references_for(names, references),
        swapped=swapped,
        raw=(raw,) if isinstance(raw, Swap) else tuple(raw or ()),
        wanted=tuple(arms) if arms is not None else None,
        compile_options=dict(compile_options or {}),
        seconds=0.8 * seconds,
        alone_seconds=0.2 * seconds,
    )


def _enough(blocks: Sequence[Block]) -> bool:
    """Whether every arm's verdict stands already; looked at seldom, so that it is no lottery."""
    if len(blocks) < statistics.FIRST_LOOK or len(blocks) % statistics.NEXT_LOOK:
        return False
    names = set(blocks[-1].seconds) - {BASELINE, TWIN}
    return all(
        statistics.decided(statistics.interval([[b.log(BASELINE) - b.log(n) for b in blocks]]))
        for n in names
    )


def _stopped(reading: Reading, question: session.Question, seconds: float) -> str:
    if reading.series is None:
        return "nothing was timed"
    count = len(reading.series.blocks)
    if count >= question.most_blocks:
        return f"{count} blocks were taken"
    if _enough(reading.series.blocks):
        return f"every verdict was sure after {count} blocks"
    return f"the {seconds:g} s were used up, after {count} blocks"


def fallback_location(subject: Subject) -> Location:
    """The model's own definition: where a finding about the whole measurement points."""
    target = type(subject.model).forward if isinstance(subject.model, torch.nn.Module) else subject.model
    try:
        lines, first = inspect.getsourcelines(target)
        path = inspect.getsourcefile(target) or "<unknown>"
    except (OSError, TypeError):
        return Location(path="<unknown>", line=1, function=getattr(target, "__name__", ""))
    return Location(path=path, line=first, function=getattr(target, "__name__", ""), text=lines[0].strip())


def report_of(
    readings: Sequence[Reading],
    question: session.Question,
    where: Location,
    stopped: str,
    ledgers: Sequence[Ledger] = (),
) -> Report:
    """The readings of all processes as a report."""
    problems = invalid_measurement.notes([p for r in readings for p in r.problems])
    rows = outcome.table(readings, problems)
    first = readings[0]
    noise = outcome.intervals(readings).get(TWIN)
    effects = [i.mde for name, i in outcome.intervals(readings).items() if name not in (TWIN, "eager")]
    alone = next(iter(first.alone.values()), {})
    share = _share_of_copy(first)
    comparison = Comparison(
        arms=rows,
        ops=(*question.ops, *(s.label for s in question.swapped)),
        noise_low=math.exp(noise.low) if noise else None,
        noise_high=math.exp(noise.high) if noise else None,
        smallest_effect=max(effects) if effects else None,
        copy_bytes_per_second=first.copy_bytes_per_second,
        kernel_share_of_copy=share,
        ledgers=tuple(ledgers),
        stopped_because=stopped,
        environment={
            **first.environment,
            "dtype": first.dtype,
            "step": "forward, backward, optimiser" if first.train else "forward",
        },
    )
    calls = sum(a.calls for form, a in alone.items() if form == "op") or sum(a.calls for a in alone.values())
    comparison = prose.with_sentence(comparison, calls, problems)
    return Report(
        opgraft=getattr(opgraft, "__version__", "unknown"),
        torch=torch.__version__,
        device=first.device,
        findings=tuple(_findings(rows, first, question, problems, where, ledgers)),
        ledger=comparison,
        degraded=() if first.copy_bytes_per_second else ("isolated times",),
    )


def _share_of_copy(reading: Reading) -> float | None:
    """Bytes an ideal kernel moves over the time ours takes, as a share of the copy in the same process."""
    if not reading.copy_bytes_per_second or reading.train:
        return None
    timed = [(op, forms["op"]) for op, forms in reading.alone.items() if "op" in forms and reading.ideal_bytes.get(op)]
    if not timed:
        return None
    moved = sum(reading.ideal_bytes[op] for op, _ in timed)
    return moved / (sum(a.us_per_step for _, a in timed) * 1e-6) / reading.copy_bytes_per_second


def _findings(
    rows: Sequence[ArmResult],
    reading: Reading,
    question: session.Question,
    problems: Sequence[Problem],
    where: Location,
    ledgers: Sequence[Ledger],
) -> list[Finding]:
    found: list[Finding] = []
    for problem in problems:
        places = [s.location for s in reading.sites if s.op == problem.op] or [where]
        if problem.about in ("op-not-run", "op-still-runs"):
            found.append(kernel_not_run.find(problem, places))
        else:
            found.append(invalid_measurement.find(problem, places[0]))
    baseline = next((r for r in rows if r.name == BASELINE), None)
    for op in question.ops:
        name = "op" if len(question.ops) == 1 else f"op {op}"
        arm = next((r for r in rows if r.name == name), None)
        places = [s.location for s in reading.sites if s.op == op]
        if baseline is None or arm is None or not places:
            continue
        forms = reading.alone.get(op, {})
        calls = forms["op"].calls if "op" in forms else len(places)
        ledger = next((one for one in ledgers if one.arm == name), None)
        one = no_gain.find(op, baseline, arm, calls, ledger, places)
        if one is not None:
            found.append(one)
    order = {"error": 0, "warning": 1, "note": 2}
    return sorted(found, key=lambda f: (order[f.severity], -(f.cost.us_per_step or 0.0)))


def remaining(begin: float, seconds: float) -> float:
    return max(0.0, seconds - (time.monotonic() - begin))
