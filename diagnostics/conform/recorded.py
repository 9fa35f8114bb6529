"""Reads what the checks of a recorded run left behind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from opgraft.diagnostics.conform.lab.remedies import remedies
from opgraft.diagnostics.conform.lab.settle import settle
from opgraft.diagnostics.kinds import KINDS
from opgraft.diagnostics.model import Callee, CheckResult, Finding, Location


def check_recorded_calls(recording: Path) -> tuple[tuple[Finding, ...], tuple[CheckResult, ...]]:
    """Findings and table of the custom ops that a run called, from the file that ``record.install`` was given."""
    findings: list[Finding] = []
    results: list[CheckResult] = []
    last: dict[str, Any] | None = None
    for line in recording.read_text(encoding="utf-8").splitlines():
        try:
            message = json.loads(line)
        except ValueError:
            continue
        say = message.get("say")
        if say == "call":
            last = message
        elif say == "done":
            last = None
        elif say == "finding":
            last = None
            findings.append(msgspec.convert(message["finding"], Finding))
        elif say == "result":
            last = None
            results.append(msgspec.convert(message["result"], CheckResult))
        elif say == "not-run":
            last = None
            results.append(CheckResult(op="all", check="all", outcome="not-run", detail=message["why"]))
        elif say == "checked":
            last = None
    if last is not None:
        findings.append(_died(last))
    blamed = any(found.severity == "error" and found.kind != "compiler-bug" for found in findings)
    # A compile that fails with a faulty op in it says nothing about the compiler.
    kept = [found for found in findings if not (blamed and found.kind == "compiler-bug")]
    return settle(kept), tuple(results)


def _died(call: dict[str, Any]) -> Finding:
    """The program ended inside a call of an op: that is a finding of its own."""
    handed_through = bool(call.get("composite")) and bool(call.get("subclass"))
    kind = "composite-kernel" if handed_through else "out-of-bounds"
    why = (
        f". Its kernel is registered as CompositeImplicitAutograd, and so gets the {call['subclass']} itself, a tensor "
        "subclass that may have no memory of its own, before the subclass can unwrap it"
        if handed_through
        else ""
    )
    return Finding(
        kind=kind,
        code=KINDS[kind].code,
        severity="error",
        message=f"{call['op']} did not come back: the program ended inside this call{why}",
        location=Location(path=call["path"], line=call["line"]),
        callee=Callee(name=call["op"], owner="op"),
        remedies=remedies(kind),
    )
