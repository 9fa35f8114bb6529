"""From readings to findings: what a comparison has to say beside its table."""

from __future__ import annotations

from collections.abc import Sequence

from opgraft.diagnostics.kinds import KINDS
from opgraft.diagnostics.model import Callee, Cost, Counts, Finding, Location, Owner, Remedy, Severity
from opgraft.registry import find


def make(
    kind: str,
    severity: Severity,
    message: str,
    sites: Sequence[Location],
    *,
    op: str = "",
    owner: Owner = "op",
    cost: Cost | None = None,
    per_step: int | None = None,
    remedies: Sequence[Remedy] = (),
    evidence: Sequence[str] = (),
) -> Finding:
    """A finding of a kind that ``kinds.py`` knows; ``sites`` has at least one place."""
    spec = find(op) if op else None
    return Finding(
        kind=kind,
        code=KINDS[kind].code,
        severity=severity,
        message=message,
        location=sites[0],
        sites=tuple(sites),
        callee=Callee(name=op, distribution=spec.owner if spec else "unknown", owner=owner) if op else None,
        counts=Counts(sites=len(sites), per_step=per_step),
        cost=cost or Cost(),
        remedies=tuple(remedies),
        evidence=tuple(evidence),
    )
