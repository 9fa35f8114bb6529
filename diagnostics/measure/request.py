"""What a worker process is asked, as JSON: where the model comes from and what to measure."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from opgraft.diagnostics.measure import ops
from opgraft.diagnostics.measure.question import Question
from opgraft.diagnostics.measure.source import load_build
from opgraft.diagnostics.measure.subject import Subject, built
from opgraft.diagnostics.measure.swap import Swap


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One process's task.

    Attributes:
        task: ``time`` gives a Reading, ``facts`` a FactsReading.
        target: ``FILE.py:build``.
        raw: name of a function or a value in the same file that gives the ``Swap`` of the raw arm.
        leave_out: arms that ended an earlier process and are not run again.
    """

    task: Literal["time", "facts"]
    target: str
    ops: tuple[str, ...] = ()
    raw: str | None = None
    arms: tuple[str, ...] | None = None
    leave_out: tuple[str, ...] = ()
    train: bool = False
    device: str | None = None
    compile_options: dict[str, Any] = {}
    seconds: float = 10.0
    alone_seconds: float = 2.0
    check: bool = True
    alone: bool = True
    apart: bool = False
    seed: int = 0
    most_blocks: int = 60


def subject_for(request: Request) -> Subject:
    return built(load_build(request.target), train=request.train, device=request.device)


def question_for(request: Request, subject: Subject) -> Question:
    """The question that a request asks of its subject: names of ops become ops and references.

    Raises:
        LookupError, TypeError: an op or the raw form is not there.
    """
    names, _ = ops.split(request.ops)
    swapped: tuple[Swap, ...] = ()
    given: dict[Any, Any] = {}
    place = request.target.rpartition(":")[0] or request.target
    if (found := _optional(place, "references")) is not None:
        given = dict(found() if callable(found) else found)
    if (found := _optional(place, "unregistered")) is not None:
        made = found() if callable(found) else found
        swapped = (made,) if isinstance(made, Swap) else tuple(made)
    if not names and not swapped:
        names = ops.discover(subject)
    raw = raw_of(place, request.raw) if request.arms is None or "raw" in request.arms else ()
    return Question(
        ops=names,
        references=ops.references_for(names, given),
        swapped=swapped,
        raw=raw,
        wanted=_wanted(request, names, swapped, raw),
        compile_options=request.compile_options,
        seconds=request.seconds,
        alone_seconds=request.alone_seconds,
        check=request.check,
        alone=request.alone,
        apart=request.apart,
        seed=request.seed,
        most_blocks=request.most_blocks,
    )


def raw_of(place: str, name: str | None) -> tuple[Swap, ...]:
    """The raw form that a file offers: what ``name`` says, by default a function ``raw`` if it has one.

    Raises:
        TypeError: it is no Swap.
    """
    found = _optional(place, name or "raw", required=name is not None)
    if found is None:
        return ()
    try:
        made = found() if callable(found) else found
    except Exception as error:  # a kernel that does not build here: the reader decides whether to go on without it
        reason = str(error).strip().splitlines()
        raise LookupError(
            f"{name or 'raw'}() in {place} fails ({type(error).__name__}: {reason[0] if reason else ''}): mend it, or "
            "leave that arm out with --arms eager,op"
        ) from error
    swaps = (made,) if isinstance(made, Swap) else tuple(made) if isinstance(made, (tuple, list)) else ()
    if not swaps or not all(isinstance(one, Swap) for one in swaps):
        if name is None:
            return ()
        raise TypeError(f"{name} in {place} is a {type(made).__name__}, expected Swap(module, 'function', kernel)")
    return swaps


def _optional(place: str, name: str, required: bool = False) -> Any:
    import importlib
    import sys
    from pathlib import Path

    module = sys.modules.get(Path(place).stem) if place.endswith(".py") else importlib.import_module(place)
    found = getattr(module, name, None)
    if found is None and required:
        raise LookupError(f"{place} has no {name}: it has to give Swap(module, 'function', kernel)")
    return found


def _wanted(
    request: Request, names: tuple[str, ...], swapped: tuple[Swap, ...], raw: tuple[Swap, ...]
) -> tuple[str, ...] | None:
    if not request.leave_out:
        return request.arms
    from opgraft.diagnostics.measure.arms import BASELINE, TWIN, plan_arms

    plans = [p.name for p in plan_arms(names, swapped, raw, request.arms)]
    return tuple(n for n in plans if n not in request.leave_out and n not in (BASELINE, TWIN))
