"""Joins what the run showed and what the doctor says: one cause, one finding."""

from __future__ import annotations

import msgspec

from opgraft.diagnostics.diagnose.gather import sort_key
from opgraft.diagnostics.model import CheckResult, Finding, Report

_FOLLOWS = frozenset(
    [
        "missing-fake",
        "other-break",
        "recompile",
        "fake-specializes",
        "host-code",
        "host-read",
        "data-dependent-shape",
        "opaque-call",
    ]
)


def merge(report: Report, findings: tuple[Finding, ...], checks: tuple[CheckResult, ...]) -> Report:
    """The doctor's findings first. One of the run's that follows from an op's fault is evidence in it, not beside
    it."""
    extra = list(findings)
    kept = []
    for seen in report.findings:
        index = next((i for i, found in enumerate(extra) if is_same_cause(found, seen)), None)
        if index is None:
            kept.append(seen)
        else:
            extra[index] = joined(extra[index], seen)
    return msgspec.structs.replace(
        report, findings=tuple(sorted([*extra, *kept], key=sort_key)), checks=(*report.checks, *checks)
    )


def is_same_cause(found: Finding, seen: Finding) -> bool:
    """True where ``seen`` merely follows from the fault that ``found`` names: same op, or same line."""
    if found.kind == seen.kind:
        return _op(found) == _op(seen) != "" or _place(found) == _place(seen)
    if found.severity == "note" or seen.kind not in _FOLLOWS:
        return False
    if _op(found) and (_op(found) == _op(seen) or (seen.kind == "other-break" and _names(seen, _op(found)))):
        return True
    return _place(found) == _place(seen) and found.severity in ("error", "warning")


def joined(found: Finding, seen: Finding) -> Finding:
    """``found`` with the counts, the stack and torch's messages of ``seen``."""
    evidence = (*found.evidence, f"in the run: {seen.message}") if seen.kind != found.kind else found.evidence
    return msgspec.structs.replace(
        found,
        counts=seen.counts,
        causes=found.causes or seen.causes,
        stack=found.stack or seen.stack,
        cost=seen.cost if found.cost.us_per_step is None else found.cost,
        evidence=evidence,
    )


def _names(finding: Finding, op: str) -> bool:
    """Does torch's message speak of this op, as ``ns::op`` or as ``ns.op``?"""
    texts = (finding.message, *(f"{cause.context} {cause.explanation}" for cause in finding.causes), *finding.evidence)
    return any(name in text for text in texts for name in (op, op.replace("::", ".") + "."))


def _op(finding: Finding) -> str:
    callee = finding.callee
    return callee.name.partition(".")[0] if callee is not None and callee.owner == "op" and "::" in callee.name else ""


def _place(finding: Finding) -> tuple[str, int]:
    return finding.location.path, finding.location.line
