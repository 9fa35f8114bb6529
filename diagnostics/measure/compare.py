"""``compare``: is the kernel worth it in the model? Arms, checks, interleaved times, verdicts, and the reasons."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import inspect
import linecache
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from opgraft.diagnostics.measure import assemble, campaign, collect, session, source, statistics
from opgraft.diagnostics.measure import ops as measured_ops
from opgraft.diagnostics.measure.arms import BASELINE, TWIN
from opgraft.diagnostics.measure.blocks import Block
from opgraft.diagnostics.measure.question import Question
from opgraft.diagnostics.measure.readings import Reading
from opgraft.diagnostics.measure.request import Request
from opgraft.diagnostics.measure.subject import Subject, subject_of
from opgraft.diagnostics.measure.swap import Swap
from opgraft.diagnostics.model import Location, Report

__all__ = ["Swap", "compare", "compare_file"]

Progress = Callable[[str, float], None]


def compare(
    model: Callable[..., Any] | str,
    inputs: Any = (),
    ops: Sequence[Any] = (),
    *,
    arms: Sequence[str] | None = None,
    raw: Swap | Sequence[Swap] | str | None = None,
    references: Mapping[Any, Callable[..., Any]] | None = None,
    train: bool = False,
    loss: Callable[[Any], torch.Tensor] | None = None,
    optimizer: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer] | None = None,
    seconds: float = 60.0,
    compile_options: Mapping[str, Any] | None = None,
    device: torch.device | str | None = None,
    processes: int = 5,
    ledger: bool = True,
    predict: bool = False,
    progress: Progress | None = None,
) -> Report:
    """Times a model with its custom ops against the same model with their references, and says why they differ.

    The model is not edited: both sides are compiled from it, and differ at the ops' call sites alone.

    Args:
        model: an ``nn.Module`` or a function that calls the ops, measured in this process; or ``"FILE.py:build"``,
            measured over fresh processes with caches of their own. One process cannot know what another would have
            measured: intervals from the first form hold for the process that took them.
        inputs: one batch: a tensor, a tuple of arguments, or a dict of keyword arguments.
        ops: names (``"ns::op"``), overloads, public functions, or ``Swap(module, "name", reference)`` for a function
            that is not registered. By default every op with a record that the model calls.
        arms: names of the arms to run beside ``compiler``, of ``eager``, ``op``, ``op ns::name``, ``raw``.
        raw: the unregistered form of an op, as ``Swap(module, "name", kernel)``: becomes the arm ``raw``. With a file,
            the name of a function there that returns it; a function called ``raw`` is taken by itself.
        references: plain torch for ops without a record, or in place of the record's.
        train: a step is forward, backward and optimiser step; else forward under ``no_grad``.
        loss: takes the output to a scalar. By default every output gets a fixed random gradient.
        optimizer: takes the parameters to an optimiser; plain SGD by default. Its learning rate is set to 0.
        seconds: time for timing over all processes, beside what compiling takes.
        compile_options: keyword arguments of ``torch.compile`` for every arm.
        device: where to run; where the model is, by default.
        processes: how many fresh processes at most, for ``"FILE.py:build"``.
        ledger: compile once more with caches off, and split the difference into terms.
        predict: add the step that isolated times and one compiled graph alone would have foretold.
        progress: called with a message and the share done.

    Returns:
        A report whose ``ledger`` is the comparison and whose findings say what stands against the kernel or against
        the measurement.

    Raises:
        TypeError, LookupError, ValueError: the model, an op or an arm is not what it has to be.
    """
    if isinstance(model, str):
        _for_files(raw=raw, references=references, loss=loss, optimizer=optimizer)
        return compare_file(
            model,
            ops,
            arms=arms,
            raw=raw if isinstance(raw, str) else None,
            train=train,
            seconds=seconds,
            compile_options=compile_options,
            device=device,
            processes=processes,
            ledger=ledger,
            predict=predict,
            progress=progress,
        )
    if isinstance(raw, str):
        raise TypeError(
            "compare: raw is the name of a function, which needs FILE.py:build; give Swap(module, 'name', kernel)"
        )
    tell = progress or (lambda message, share: None)
    subject = subject_of(model, inputs, train=train, loss=loss, optimizer=optimizer, device=device)
    question = make_question(subject, ops, arms, raw, references, compile_options, seconds)
    question = dataclasses.replace(question, apart=ledger or predict)
    timing = 0.6 if ledger or predict else 1.0
    reading = session.run(subject, question, lambda m, s: tell(m, timing * s), enough=_enough)
    facts = None
    if (ledger or predict) and reading.series is not None:
        facts = collect.collect(subject, question, lambda m, s: tell(m, timing + (1 - timing) * s), _worth(reading))
    stopped = _stopped(reading, question, seconds)
    return assemble.report_of([reading], fallback_location(subject), stopped, facts, predict=predict)


def _for_files(**given: Any) -> None:
    """What a file has to bring itself: a function cannot be handed to another process."""
    for name, value in given.items():
        if value is not None and not isinstance(value, str):
            raise TypeError(
                f"compare: {name} cannot be given beside FILE.py:build, which is measured in other processes: define "
                f"{'it as ' + name + ' in that file' if name in ('raw', 'references') else 'it in build()'}"
            )


def compare_file(
    target: str,
    ops: Sequence[Any] = (),
    *,
    arms: Sequence[str] | None = None,
    raw: str | None = None,
    train: bool = False,
    seconds: float = 60.0,
    compile_options: Mapping[str, Any] | None = None,
    device: torch.device | str | None = None,
    processes: int = 5,
    ledger: bool = True,
    predict: bool = False,
    limit: float | None = None,
    progress: Progress | None = None,
) -> Report:
    """``compare`` over fresh processes; the model comes from ``FILE.py:build``, and nothing of it runs here.

    Args:
        limit: seconds that one process may take; by default ten minutes beside twice ``seconds``.

    Raises:
        LookupError: the file, the function, an op or its reference is not there.
    """
    count = max(1, processes)
    request = Request(
        task="time",
        target=target,
        ops=tuple(op if isinstance(op, str) else measured_ops.name_of(op) for op in ops),
        raw=raw,
        arms=tuple(arms) if arms is not None else None,
        train=train,
        device=None if device is None else str(device),
        compile_options=dict(compile_options or {}),
        seconds=0.8 * seconds / count,
        alone_seconds=0.2 * seconds,
    )
    found = campaign.run(
        request, processes=count, limit=limit or 600 + 2 * seconds, ledger=ledger or predict, progress=progress
    )
    place, name = source.split(target)
    line = _line_of(place, name)
    where = Location(path=place, line=line, function=name, text=linecache.getline(place, line).strip())
    if not found.readings:
        return assemble.nothing_of(found.problems, where, found.stopped)
    return assemble.report_of(found.readings, where, found.stopped, found.facts, found.problems, predict=predict)


def make_question(
    subject: Subject,
    wanted_ops: Sequence[Any],
    arms: Sequence[str] | None,
    raw: Swap | Sequence[Swap] | None,
    references: Mapping[Any, Callable[..., Any]] | None,
    compile_options: Mapping[str, Any] | None,
    seconds: float,
) -> Question:
    names, swapped = measured_ops.split(wanted_ops)
    if not names and not swapped:
        names = measured_ops.discover(subject)
    return Question(
        ops=names,
        references=measured_ops.references_for(names, references),
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
        statistics.decided(statistics.interval([[b.log(BASELINE) - b.log(name) for b in blocks]])) for name in names
    )


def _stopped(reading: Reading, question: Question, seconds: float) -> str:
    if reading.series is None:
        return "nothing could be timed"
    count = len(reading.series.blocks)
    if count >= question.most_blocks:
        return f"{count} blocks were taken"
    if _enough(reading.series.blocks):
        return f"every verdict was sure after {count} blocks"
    return f"the {seconds:g} s were used up, after {count} blocks"


def _worth(reading: Reading) -> frozenset[str]:
    """Arms whose step is taken apart: the baseline and those that ran."""
    return frozenset(a.name for a in reading.arms if not a.failed and a.name not in ("eager", TWIN))


def fallback_location(subject: Subject) -> Location:
    """The model's own definition: where a finding about the whole measurement points."""
    target = type(subject.model).forward if isinstance(subject.model, torch.nn.Module) else subject.model
    name = getattr(target, "__name__", "")
    try:
        lines, first = inspect.getsourcelines(target)
        path = inspect.getsourcefile(target) or "<unknown>"
    except (OSError, TypeError):
        return Location(path="<unknown>", line=1, function=name)
    return Location(path=path, line=first, function=name, text=lines[0].strip())


def _line_of(place: str, name: str) -> int:
    with contextlib.suppress(OSError, SyntaxError, ValueError):
        for node in ast.parse(Path(place).read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.name == name:
                return node.lineno
    return 1
