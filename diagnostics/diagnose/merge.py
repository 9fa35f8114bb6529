"""Joins what the run showed and what the doctor says: one cause, one finding."""

from __future__ import annotations

import msgspec

from opgraft.diagnostics.diagnose.gather import sort_key
from opgraft.diagnostics.model import CheckResult, Finding, Report

_FOLLOWS = frozenset({"missing-fake", "other-break", "recompile", "fake-specializes", "untraceable-autograd"})
"""Kinds of the run that can merely follow from an op's fault at the same line."""
_FOLLOWS_FROM_OP = _FOLLOWS | {"host-code", "host-read", "data-dependent-shape", "opaque-call"}
"""Kinds that can follow from a fault of the very op that they name."""
_FAKES = frozenset({"fake-mismatch", "fake-specializes", "missing-fake"})


def merge(report: Report, findings: tuple[Finding, ...], checks: tuple[CheckResult, ...]) -> Report:
    """The doctor's findings first. One of the run's that follows from an op's fault is evidence in it, not beside
    it."""
    extra = [found for found in findings if not any(is_misused(seen, found) for seen in report.findings)]
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
    if found.severity == "note":
        return False
    if _op(found) and _op(found) == _op(seen):
        return seen.kind in _FOLLOWS_FROM_OP
    return _place(found) == _place(seen) and seen.kind in _FOLLOWS


def is_misused(seen: Finding, found: Finding) -> bool:
    """True where the op's fake fails only because of what the call gives it, which is what ``seen`` says."""
    misuse = seen.kind == "host-read" and seen.severity == "error"
    return misuse and found.kind in _FAKES and _place(seen) == _place(found)


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
