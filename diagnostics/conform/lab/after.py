"""What is done with a run's calls once it has ended: ops are put through the checks, happenings become findings."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable
from typing import Any

import msgspec
import torch

from opgraft.diagnostics.conform.doctor import owner
from opgraft.diagnostics.conform.host import Asked, examine_asked
from opgraft.diagnostics.conform.lab import arrive, functions, incidents, met, recompile, references
from opgraft.diagnostics.conform.lab.case import Case
from opgraft.diagnostics.conform.lab.examine import examine
from opgraft.diagnostics.conform.lab.facts import facts_of
from opgraft.diagnostics.conform.lab.graphs import Graph
from opgraft.diagnostics.conform.lab.isolate import Send
from opgraft.diagnostics.conform.lab.met import Book, Met
from opgraft.diagnostics.conform.lab.plan import Plan
from opgraft.diagnostics.conform.lab.tree import leaves
from opgraft.diagnostics.model import CheckResult, Finding, Location
from opgraft.registry import resolve

SECONDS_OF_AN_OP = 25.0
CASES_OF_AN_OP = 6


def check_book(book: Book, kept: list[Graph], send: Send, seconds: float) -> None:
    """Checks every op that was met, then the graphs that held one, and sends what was found."""
    stop = time.monotonic() + seconds
    share_of_ops = seconds * (0.6 if kept else 1.0)
    calls = located(book.calls.values(), book.events)
    names = list(dict.fromkeys(call.name for call in calls))
    for index, name in enumerate(names):
        left = stop - time.monotonic() - (seconds - share_of_ops)
        share = min(SECONDS_OF_AN_OP, max(left / (len(names) - index), 1.0))
        if left < 1.0:
            _result(send, CheckResult(op=name, check="all", outcome="not-run", detail="the time for custom ops was up"))
            continue
        mine = [call for call in calls if call.name == name]
        for finding in incidents.of_calls(name, mine, book):
            _finding(send, finding)
        try:
            overload = resolve(name)
        except LookupError as error:
            _result(send, CheckResult(op=name, check="all", outcome="not-run", detail=str(error)))
            continue
        facts = facts_of(overload)
        cases = tuple(cases_of(mine))
        plan = Plan(
            facts=facts,
            cases=cases,
            device=_device(cases),
            recorded=True,
            seconds=share,
            met=flags(mine, book, facts),
            distribution=owner(facts.spec),
        )
        findings, results = examine(plan)
        for finding in findings:
            _finding(send, finding)
        for result in results:
            _result(send, result)
    for finding in (*incidents.of_events(book), *functions.writing_backwards()):
        _finding(send, finding)
    recompile.check_graphs(kept, send, stop - time.monotonic())


def check_book_elsewhere(book: Book, script: str, send: Send, seconds: float) -> None:
    """The same where this process cannot be forked, since it uses CUDA: the ops are registered again in another one,
    and examined there on what was kept of their calls. Graphs are not compiled again.

    Args:
        script: the path of the program, whose registrations are repeated; ``""`` where there is none.
    """
    calls = located(book.calls.values(), book.events)
    asked = []
    for name in dict.fromkeys(call.name for call in calls):
        mine = [call for call in calls if call.name == name]
        for finding in incidents.of_calls(name, mine, book):
            _finding(send, finding)
        try:
            facts = facts_of(resolve(name))
        except LookupError as error:
            _result(send, CheckResult(op=name, check="all", outcome="not-run", detail=str(error)))
            continue
        asked.append(
            Asked(
                name=name,
                cases=tuple(cases_of(mine, rebuilt=False)),
                met=flags(mine, book, facts),
                device=next((place for call in mine for place in _places((call.args, call.kwargs))), "cpu"),
                imports=arrive.registrars(facts),
            )
        )
    for finding in (*incidents.of_events(book), *functions.writing_backwards()):
        _finding(send, finding)
    if asked:
        share = min(SECONDS_OF_AN_OP, seconds / len(asked))
        for part in examine_asked(asked, script=script, seconds=share):
            for finding in part.findings:
                _finding(send, finding)
            for result in part.checks:
                _result(send, result)


def _places(value: Any) -> Iterable[str]:
    """The devices of the kept tensors, CUDA first: an op with a tensor there is an op of CUDA."""
    found = {leaf.device for leaf in leaves(value) if isinstance(leaf, met.Kept)}
    return sorted(found, reverse=True)


def _finding(send: Send, finding: Finding) -> None:
    send({"say": "finding", "finding": msgspec.to_builtins(finding)})


def _result(send: Send, result: CheckResult) -> None:
    send({"say": "result", "result": msgspec.to_builtins(result)})


def _device(cases: Iterable[Case]) -> torch.device:
    found = [tensor.device for case in cases for tensor in case.tensors]
    return found[0] if found else torch.device("cpu")


def _shapes(value: Any) -> tuple[Any, ...]:
    """The shapes of the kept tensors, by which a call of compiled code is told to belong to a traced one."""
    if isinstance(value, met.Kept):
        return (value.shape,)
    if isinstance(value, (list, tuple)):
        return tuple(_shapes(item) for item in value)
    if isinstance(value, dict):
        return tuple(_shapes(item) for item in value.values())
    return ()


def located(calls: Iterable[Met], events: Iterable[dict[str, Any]] = ()) -> list[Met]:
    """The calls in order, those of compiled code with the place where they were traced, and its ``requires_grad``.

    A call that a compiler pass inserted has the place at which the pass does so.
    """
    inserted = {event["name"]: event["where"] for event in events if event["what"] == "inserted"}
    ordered = sorted(calls, key=lambda call: call.order)
    traced = [call for call in ordered if call.how == "traced" and call.location is not None]
    for call in ordered:
        if call.location is not None:
            continue
        same_op = [other for other in traced if other.name == call.name]
        alike = [other for other in same_op if _shapes((other.args, other.kwargs)) == _shapes((call.args, call.kwargs))]
        source = next(iter(alike or same_op), None)
        if source is None:
            call.location = (
                inserted.get(call.name) or references.insertion(call.name) or references.call_site(call.name)
            )
        else:
            call.location = source.location
            if call.how == "compiled" and alike and source.grad:
                call.args, call.kwargs = _with_flags((call.args, call.kwargs), (source.args, source.kwargs))
                call.grad = True
    return ordered


def _with_flags(values: Any, flags: Any) -> Any:
    if isinstance(values, met.Kept) and isinstance(flags, met.Kept):
        return dataclasses.replace(values, requires_grad=flags.requires_grad)
    if isinstance(values, (list, tuple)) and isinstance(flags, (list, tuple)):
        return type(values)(_with_flags(a, b) for a, b in zip(values, flags, strict=False))
    if isinstance(values, dict) and isinstance(flags, dict):
        return {key: _with_flags(value, flags.get(key)) for key, value in values.items()}
    return values


def cases_of(calls: list[Met], rebuilt: bool = True) -> list[Case]:
    """One case for each form of call: real ones first, and a traced one where no real one is like it.

    Args:
        rebuilt: with tensors; else with what was kept of them.
    """
    found: list[Case] = []
    seen: set[Any] = set()
    for call in sorted(calls, key=lambda call: (call.how == "traced", call.order)):
        if call.sharded:
            continue
        form = (_shapes((call.args, call.kwargs)), call.location and call.location.line)
        extra = (call.autocast, _flags((call.args, call.kwargs)) if call.grad else ())
        if call.how == "traced" and (form, extra) in seen:
            continue
        seen.add((form, extra))
        args, kwargs = call.args, call.kwargs
        if not call.grad:
            args, kwargs = _without_flags((args, kwargs))
        if rebuilt:
            args, kwargs = met.rebuild((args, kwargs))
        found.append(
            Case(
                args=tuple(args),
                kwargs=dict(kwargs),
                origin="recorded",
                name=f"{call.how} call {call.order}",
                autocast=call.autocast,
                location=call.location,
            )
        )
        if len(found) >= CASES_OF_AN_OP:
            break
    return found


def _without_flags(value: Any) -> Any:
    """The same with no tensor that requires grad."""
    if isinstance(value, met.Kept):
        return dataclasses.replace(value, requires_grad=False)
    if isinstance(value, (list, tuple)):
        return type(value)(_without_flags(item) for item in value)
    if isinstance(value, dict):
        return {key: _without_flags(item) for key, item in value.items()}
    return value


def _flags(value: Any) -> tuple[Any, ...]:
    if isinstance(value, met.Kept):
        return (value.requires_grad,)
    if isinstance(value, (list, tuple)):
        return tuple(_flags(item) for item in value)
    if isinstance(value, dict):
        return tuple(_flags(item) for item in value.values())
    return ()


def flags(calls: list[Met], book: Book, facts: Any) -> frozenset[str]:
    """What the run did with this op, as the checks ask for it."""
    found = {event["what"] for event in book.events if event["what"] in ("backward", "create_graph")}
    if "create_graph" in found:
        found.add("backward")
    if "autograd formula" in book.error:
        found.add("backward")
    traced = [call for call in calls if call.how == "traced"]
    real = [call for call in calls if call.how != "traced"]
    if traced:
        found.add("compile")
    if traced and not real and not any(call.error for call in traced):
        found.add("dropped")
    positional = [argument.name for argument in facts.arguments if not argument.keyword]
    for call in traced:
        found |= {positional[index] for index in call.sizes if index < len(positional)}
    return frozenset(found)


def place_of(calls: list[Met]) -> Location | None:
    return next((call.location for call in calls if call.location is not None), None)
