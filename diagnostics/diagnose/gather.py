"""Verdicts -> findings: incidents with one cause are one finding, with its sites and its four counts."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from opgraft.diagnostics.diagnose.incident import Incident, Verdict
from opgraft.diagnostics.diagnose.story import BEFORE
from opgraft.diagnostics.kinds import KINDS
from opgraft.diagnostics.model import Counts, Finding, Location

_SITES_KEPT = 200
_WAYS_TOLD = 6
_ORDER = {"error": 0, "warning": 1, "note": 2}


@dataclass
class Group:
    """The incidents of one cause: the first one whole, of the others what is counted."""

    verdict: Verdict
    incident: Incident
    number: int
    sites: dict[tuple[str, int], Location] = field(default_factory=OrderedDict)
    callers: dict[tuple[tuple[str, int], ...], tuple[Location, ...]] = field(default_factory=OrderedDict)
    sites_seen: int = 0
    compiles: int = 0
    skipped: int = 0
    failures: int = 0
    later: int = 0
    before: int = 0
    ids: set[str] = field(default_factory=set)
    own_ids: set[str] = field(default_factory=set)


class Groups:
    """Collects verdicts by their key. A finding is as bad as its worst incident."""

    def __init__(self) -> None:
        self._groups: dict[tuple[object, ...], Group] = OrderedDict()

    def add(self, incident: Incident, verdict: Verdict) -> None:
        group = self._groups.get(verdict.key)
        if group is None:
            group = self._groups[verdict.key] = Group(verdict, incident, len(self._groups))
        elif _ORDER[verdict.severity] < _ORDER[group.verdict.severity]:
            group.verdict, group.incident = verdict, incident
        place = (verdict.location.path, verdict.location.line)
        if place not in group.sites:
            group.sites_seen += 1
            if len(group.sites) < _SITES_KEPT:
                group.sites[place] = verdict.location
        callers = tuple((frame.path, frame.line) for frame in incident.reader_stack[:-1])
        if len(group.callers) < _SITES_KEPT and callers not in group.callers:
            group.callers[callers] = incident.reader_stack[:-1]
        group.compiles += 1
        group.skipped += incident.form == "skip"
        group.failures += incident.form == "failure"
        group.later += not incident.id.endswith("/0")
        group.before += incident.id.startswith(BEFORE)
        group.ids.add(incident.id)
        if len(incident.stack) <= 1:
            group.own_ids.add(incident.id)  # not inlined: this compile's gap is where the statement itself runs

    def groups(self) -> tuple[Group, ...]:
        return tuple(self._groups.values())


def finding(group: Group, per_step: int | None = None) -> Finding:
    """The finding of a group."""
    verdict, incident = group.verdict, group.incident
    evidence = list(verdict.evidence)
    message = verdict.message
    if incident.form == "failure" and "fail" not in message and "error" not in message:
        message += " Here the compile fails (fullgraph=True)."
    evidence.extend(_other_ways(group, incident))
    if group.skipped:
        frames = f"{group.skipped} frames run" if group.skipped > 1 else "a frame runs"
        evidence.append(f"{frames} wholly in eager because of it; torch._dynamo.explain does not count that as a break")
    if group.before:
        every = "it was" if group.before == group.compiles else f"{group.before} of {group.compiles} were"
        evidence.append(f"{every} compiled before this watch began; torch's own records tell of it, without the callee")
    return Finding(
        kind=verdict.kind,
        code=KINDS[verdict.kind].code,
        severity=verdict.severity,
        message=message,
        location=next(iter(group.sites.values())),
        stack=incident.reader_stack,
        sites=tuple(group.sites.values()),
        callee=verdict.callee,
        causes=incident.causes,
        counts=Counts(sites=group.sites_seen, compiles=group.compiles, frames_skipped=group.skipped, per_step=per_step),
        remedies=verdict.remedies,
        evidence=tuple(evidence),
    )


def _other_ways(group: Group, incident: Incident) -> list[str]:
    """Where else the cause is reached from: of every other way its innermost frame that the shown stack has not."""
    shown = {(frame.path, frame.line) for frame in incident.reader_stack}
    ways: OrderedDict[tuple[str, int], Location] = OrderedDict()
    for callers in group.callers.values():
        other = next((frame for frame in reversed(callers) if (frame.path, frame.line) not in shown), None)
        if other is not None:
            ways.setdefault((other.path, other.line), other)
    told = []
    for place in list(ways.values())[:_WAYS_TOLD]:
        where = f"{place.path.rpartition('/')[2]}:{place.line} in {place.function}"
        told.append(f"also reached from {where}: {place.text.strip()[:100]}")
    if len(ways) > _WAYS_TOLD:
        told.append(f"and from {len(ways) - _WAYS_TOLD} more places")
    return told


def sort_key(found: Finding) -> tuple[int, int, float, int]:
    """Worst first: errors, then frames that never compile, then by cost and by how often."""
    cost = found.cost.us_per_step or 0.0
    return (
        _ORDER[found.severity],
        0 if found.counts.frames_skipped else 1,
        -cost,
        -(found.counts.per_step or found.counts.compiles),
    )
