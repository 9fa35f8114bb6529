"""Puts one op through the checks, in forks that may die, and gathers what they said."""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import msgspec
import torch

from opgraft.diagnostics import _compat
from opgraft.diagnostics.conform.lab import arrive, witness
from opgraft.diagnostics.conform.lab.bench import Bench, Fault, NotApplicable, NotRun, sentence
from opgraft.diagnostics.conform.lab.case import snippet
from opgraft.diagnostics.conform.lab.facts import OpFacts
from opgraft.diagnostics.conform.lab.isolate import Ending, Message, Send, run_isolated
from opgraft.diagnostics.conform.lab.order import Check, checks
from opgraft.diagnostics.conform.lab.plan import Plan, accepted, candidates
from opgraft.diagnostics.conform.lab.remedies import remedies
from opgraft.diagnostics.kinds import KINDS
from opgraft.diagnostics.model import Callee, CheckResult, Finding

# A crash in a call that was varied this way is a fault of this kind.
CRASH_KINDS = {"empty": "empty-input", "offset": "misaligned", "far": "index-overflow", "layout": "layout-assumed"}
MEMORY_BYTES = 6 << 30
# A call that says nothing for so long hangs; a compile may take longer.
SILENCE_SECONDS = 5.0
COMPILE_SECONDS = 120.0
# The first use of a GPU loads libraries and makes a context; that time is not the op's.
START_SECONDS = 60.0
SILENCE = {"compile": COMPILE_SECONDS, "start": START_SECONDS}
ATTEMPTS = 8
# Faults that an index which points too far would bring about as well.
MEMORY_KINDS = ("out-of-bounds", "empty-input")
SLOW = "the check took too long by itself, after a call had come back"
TIME_UP = "the time for this op was up"
# Exit code of a fork whose device context an op has taken away.
LOST_CODE = 86
# Checks that say something about an op which takes no call that is known.
WITHOUT_CALLS = ("missing-kernel", "bad-schema")
LOOSE = "a number, or a value of another tensor, may point past an extent of this call; the op does not look"


def to_finding(plan: Plan, kind: str, fault: Fault) -> Finding:
    """The finding that a fault is, with its place, remedies and a snippet that runs."""
    case = fault.case
    location = case.location if case is not None and case.location is not None else plan.facts.location
    loose = case is not None and case.loose
    evidence = [*fault.evidence, *((LOOSE,) if loose and kind in MEMORY_KINDS else ())]
    if case is not None:
        tail = fault.tail or witness.tail(kind, bool(plan.facts.written))
        arriving = arrive.lines(plan.registrars)
        with contextlib.suppress(Exception):
            evidence.append("to see it:\n" + snippet(plan.facts.name, case, tail, arriving, plan.facts.schema))
    return Finding(
        kind=kind,
        code=KINDS[kind].code,
        severity="warning" if fault.severity == "error" and kind in MEMORY_KINDS and loose else fault.severity,
        message=fault.message,
        location=location,
        callee=Callee(name=plan.facts.name, distribution=plan.distribution, owner="op"),
        remedies=remedies(kind, *fault.remedies),
        evidence=tuple(evidence),
    )


def _prepare(plan: Plan) -> None:
    """In the fork: nothing of the caller's state is in force."""
    if not plan.fresh:
        # libgomp's threads did not come along with the fork: a parallel region would wait for them forever.
        torch.set_num_threads(1)
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    torch.set_default_device(None)
    torch.use_deterministic_algorithms(False)
    torch.set_autocast_enabled("cpu", False)
    if plan.device.type == "cuda":
        # The program that met the calls may hold the rest, and other forks want theirs.
        index = torch.cuda.current_device() if plan.device.index is None else plan.device.index
        free, total = torch.cuda.mem_get_info(index)
        torch.cuda.set_per_process_memory_fraction((0.5 if plan.recorded else 0.9) * free / total, index)
    _compat.quiet_compiler()


def _work(
    plan: Plan, todo: tuple[Check, ...], avoid: frozenset[str], share: Callable[[str], float]
) -> Callable[[Send], None]:
    def work(send: Send) -> None:
        send({"say": "check", "check": "", "doing": "start"})
        _prepare(plan)
        if plan.device.type == "cuda":
            torch.randn(8, device=plan.device).mul_(2).sum().item()
        send({"say": "ready"})

        def announce(key: str, change: str, text: str, loose: bool) -> None:
            send({"say": "call", "key": key, "change": change, "text": text, "loose": loose})

        def back() -> None:
            send({"say": "back"})

        def lost(text: str) -> None:
            send({"say": "lost", "text": text.splitlines()[0]})
            os._exit(LOST_CODE)

        bench = Bench(
            facts=plan.facts,
            cases=(),
            announce=announce,
            back=back,
            lost=lost,
            avoid=avoid,
            recorded=plan.recorded,
            thorough=plan.thorough,
            met=plan.met,
            registrars=plan.registrars,
        )
        send({"say": "check", "check": ""})
        bench.cases, why = accepted(plan, bench)
        refused = tuple(itertools.islice(candidates(plan), 1)) if not bench.cases else ()
        send({"say": "cases", "count": len(bench.cases), "why": why})
        for check in todo:
            start = time.monotonic()
            bench.deadline = start + share(check.name)
            send({"say": "check", "check": check.name})
            outcome, detail = "pass", ""
            if not bench.cases and check.name in WITHOUT_CALLS:
                bench.cases = refused
            if not bench.cases:
                outcome, detail = "not-run", why
            else:
                try:
                    for fault in check.run(bench):
                        kind = fault.kind or check.kind
                        finding = to_finding(plan, kind, fault)
                        send({"say": "finding", "check": check.name, "finding": msgspec.to_builtins(finding)})
                        # A note is a hazard or a price, and no failure.
                        outcome = "fail" if fault.severity != "note" or outcome == "fail" else outcome
                        detail = fault.message
                except NotApplicable as reason:
                    outcome, detail = ("not-applicable", str(reason)) if outcome == "pass" else (outcome, detail)
                except NotRun as reason:
                    outcome, detail = ("not-run", str(reason)) if outcome == "pass" else (outcome, detail)
                except torch.OutOfMemoryError as error:
                    if outcome == "pass":
                        outcome, detail = "not-run", f"it takes more memory than there is: {sentence(error)}"
                except Exception as error:
                    if outcome == "pass":
                        outcome, detail = "not-run", f"the check itself failed: {_traced(error)}"
            if bench.cases is refused:
                bench.cases = ()
            send(
                {
                    "say": "result",
                    "check": check.name,
                    "outcome": outcome,
                    "detail": detail,
                    "seconds": time.monotonic() - start,
                }
            )

    return work


def _traced(error: Exception) -> str:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    place = f" ({trace.tb_frame.f_code.co_filename.rpartition('/')[2]}:{trace.tb_lineno})" if trace is not None else ""
    return sentence(error) + place


@dataclass
class _Notes:
    """What the forks have said so far.

    ``died`` are the checks that a call took down, with how; ``late`` the seconds until a device was ready; ``returned``
    says that the call which was announced last has come back, and ``last`` is that call, also when a check begins.
    """

    findings: list[Finding] = field(default_factory=list)
    results: dict[str, CheckResult] = field(default_factory=dict)
    check: str = ""
    key: str = ""
    change: str = ""
    text: str = ""
    loose: bool = False
    returned: bool = False
    last: tuple[str, str, str, bool] | None = None
    lost: str = ""
    began: float = 0.0
    late: float = 0.0
    died: dict[str, str] = field(default_factory=dict)


def examine(plan: Plan, chosen: Iterable[Check] | None = None) -> tuple[tuple[Finding, ...], tuple[CheckResult, ...]]:
    """Runs the checks on one op. A call that takes its process down is a finding; the rest goes on without it."""
    todo = tuple(chosen if chosen is not None else checks(plan.recorded))
    notes = _Notes()
    avoid: frozenset[str] = frozenset()
    stop = time.monotonic() + plan.seconds
    op = plan.facts.name
    reason = TIME_UP
    slow: set[str] = set()
    # Kernels are loaded at their first launch.
    patience = plan.patience * (3.0 if plan.device.type == "cuda" else 1.0)

    def receive(message: Message) -> None:
        say = message["say"]
        if say == "check":
            notes.check, notes.key, notes.change = message["check"], "", message.get("doing", "")
        elif say == "ready":
            notes.change = ""
            notes.late += time.monotonic() - notes.began
        elif say == "call":
            notes.key, notes.change, notes.text = message["key"], message["change"], message["text"]
            notes.loose, notes.returned = message["loose"], False
            notes.last = (notes.key, notes.change, notes.text, notes.loose)
        elif say == "back":
            notes.returned = True
        elif say == "lost":
            notes.lost = message["text"]
        elif say == "finding":
            notes.findings.append(msgspec.convert(message["finding"], Finding))
        elif say == "result":
            notes.results[message["check"]] = CheckResult(
                op=op,
                check=message["check"],
                outcome=message["outcome"],
                detail=message["detail"],
                seconds=message["seconds"],
            )

    for _ in range(ATTEMPTS):
        left = stop + notes.late - time.monotonic()
        notes.began = time.monotonic()
        rest = tuple(check for check in todo if check.name not in notes.results)
        if not rest or left < 0.5:
            break

        def share(name: str, rest: tuple[Check, ...] = rest) -> float:
            waiting = sum(check.name not in notes.results for check in rest)
            return max(plan.seconds / 10, (stop + notes.late - time.monotonic()) / max(waiting, 1))

        ending = run_isolated(
            _work(plan, rest, avoid, share),
            receive,
            seconds=left + 2.0 + (START_SECONDS if plan.device.type == "cuda" else 0.0),
            silence=lambda: patience * SILENCE.get(notes.change, SILENCE_SECONDS),
            memory_bytes=MEMORY_BYTES if plan.device.type == "cpu" else None,
        )
        if ending.how == "done":
            break
        if ending.how == "signal" and not notes.key and notes.last is not None:
            # A heap that a call has broken: the process dies at the next use, be it none of the op's.
            notes.key, notes.change, notes.text, notes.loose = notes.last
        if ending.how == "silent" and notes.returned and notes.check not in slow:
            # Slow itself, or stuck on a heap that the call has broken: once more, without what was varied.
            slow.add(notes.check)
            avoid = avoid | ({notes.key} if notes.change else set())
            continue
        if (
            ending.how in ("timeout", "broke")
            or not notes.key
            or (ending.how == "silent" and (notes.change == "compile" or notes.returned))
        ):
            if notes.check:
                words = SLOW if ending.how == "silent" and notes.returned else ending.sentence
                why = ending.detail.strip().splitlines()[-1:] or [words]
                notes.results[notes.check] = CheckResult(op=op, check=notes.check, outcome="not-run", detail=why[0])
                continue
            reason = (ending.detail.strip().splitlines() or [ending.sentence])[-1]
            if notes.change == "start" and ending.how != "timeout":
                reason = f"the device did not come up: {reason}"
            break
        avoid = avoid | {notes.key}
        if _refused(notes):
            notes.lost = ""
            continue
        _fatal(plan, notes, ending)
    for check in todo:
        notes.results.setdefault(check.name, CheckResult(op=op, check=check.name, outcome="not-run", detail=reason))
    for name in notes.died.keys() & notes.results.keys():
        notes.results[name] = msgspec.structs.replace(notes.results[name], outcome="fail", detail=notes.died[name])
    return tuple(notes.findings), tuple(notes.results[check.name] for check in todo)


def _refused(notes: _Notes) -> bool:
    """A kernel's own assertion took the device, over an input that we made up: it looked, and said no."""
    ours = bool(notes.change) or notes.loose or notes.key.startswith("generated")
    return ours and "device-side assert" in notes.lost


def _fatal_words(facts: OpFacts, change: str, ending: Ending) -> str:
    if change != "fake":
        return f"{facts.name} takes the process down: {ending.sentence}"
    if facts.is_composite:
        return (
            f"{facts.name} is a kernel, and registered as CompositeImplicitAutograd: traced without data "
            f"{ending.sentence}"
        )
    return f"the fake of {facts.name} takes the process down: {ending.sentence}"


def _fatal(plan: Plan, notes: _Notes, ending: Ending) -> None:
    """Turns the death of a fork into a finding about the call that was announced last."""
    kind = CRASH_KINDS.get(notes.change, "out-of-bounds")
    if notes.change == "fake":
        kind = "composite-kernel" if plan.facts.is_composite else "fake-mismatch"
    elif ending.how == "exit" and notes.lost:
        ending, notes.lost = Ending("exit", LOST_CODE, f"the device reports: {notes.lost}"), ""
    elif ending.how in ("silent", "exit"):
        kind = "empty-input" if notes.change == "empty" else "wrong-value"
    arguments, _, source = notes.text.partition("\n")
    guessed = notes.key.startswith("generated")
    case_location = plan.place or next((case.location for case in plan.cases if case.location is not None), None)
    notes.findings.append(
        Finding(
            kind=kind,
            code=KINDS[kind].code,
            severity="warning" if (guessed and not notes.change) or notes.loose else "error",
            message=_fatal_words(plan.facts, notes.change, ending),
            location=case_location or plan.facts.location,
            callee=Callee(name=plan.facts.name, distribution=plan.distribution, owner="op"),
            remedies=remedies(kind),
            evidence=(f"called with {arguments}", *((LOOSE,) if notes.loose else ()), f"to see it:\n{source}"),
        )
    )
    notes.died.setdefault(kind, ending.sentence)
    notes.died.setdefault(notes.check, ending.sentence)
