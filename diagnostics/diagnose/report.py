"""Events -> report: the whole diagnosis."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from opgraft.diagnostics.collect.events import RECOMPILE_LIMIT, Event
from opgraft.diagnostics.diagnose import (
    cache_bypass,
    cost,
    cudagraph_skip,
    explain_figures,
    library_jit,
    recompile,
    stale_cache,
    timeline,
    traced_again,
)
from opgraft.diagnostics.diagnose.gather import Group, Groups, finding, sort_key
from opgraft.diagnostics.diagnose.remedies import leave_it
from opgraft.diagnostics.diagnose.rules import judge
from opgraft.diagnostics.diagnose.story import Reader, Story
from opgraft.diagnostics.kinds import KINDS
from opgraft.diagnostics.model import ExplainFigures, Finding, Report, Run


def diagnose(stream: Iterable[Event], run: Run | None = None) -> Report:
    """Reads a stream once and reports. ``run`` is what the parent process knows of how the run ended."""
    reader = Reader()
    groups = Groups()
    for incident in reader.incidents(stream):
        if not incident.gb_type.startswith(RECOMPILE_LIMIT):
            groups.add(incident, judge(incident))
    story = reader.story
    step = timeline.step_us(story)
    found = [_priced(story, group, step) for group in groups.groups()]
    found = library_jit.conclude(story, recompile.conclude(story, found))
    found += stale_cache.conclude(story) + cudagraph_skip.conclude(story) + cache_bypass.conclude(story)
    found += traced_again.conclude(story, found)
    if not story.op_uses and not any(one.kind in _KERNELS for one in found):
        found = [_without_kernel(one) for one in found]
    findings = tuple(sorted(found, key=sort_key))
    by_id = {
        identity: index
        for group in groups.groups()
        for index, one in enumerate(findings)
        if (one.kind, one.location) == (group.verdict.kind, next(iter(group.sites.values())))
        for identity in group.ids
    }
    report = Report(
        opgraft=story.began.opgraft,
        torch=story.began.torch,
        device=(story.ended.device if story.ended is not None else "") or story.began.device,
        findings=findings,
        run=_run(story, groups.groups(), run),
        regions=timeline.regions(story, by_id),
        degraded=story.began.missing,
    )
    if not story.frames:
        return report
    graphs, breaks = timeline.explain_would_say(story)
    return msgspec.structs.replace(
        report,
        explain=ExplainFigures(
            graph_count=graphs,
            graph_break_count=breaks,
            why_it_differs=explain_figures.words(graphs, breaks, report, sum(group.later for group in groups.groups())),
        ),
    )


_KERNELS = ("opaque-call", "triton-launch", "missing-fake", "untraceable-autograd")


def _without_kernel(found: Finding) -> Finding:
    """In a run with no kernel in sight, host code is not advised to become part of one."""
    if found.kind != "host-code" or len(found.remedies) < 2:
        return found
    return msgspec.structs.replace(found, remedies=tuple(r for r in found.remedies if r.id != "register-op"))


def _priced(story: Story, group: Group, step: float | None) -> Finding:
    """The finding of a group with its executions and its cost a step; ``leave-it`` goes first where it is cheap."""
    found = finding(group, timeline.per_step(story, group.own_ids or group.ids))
    callee = found.callee.name if found.callee is not None else ""
    price = cost.cost_of(story, group.ids, callee, step)
    evidence = found.evidence
    if price.how == "measured":
        known = cost.own_time_known(story, group.ids, callee)
        how = "the time between the graphs at the break, " + (
            "less the kernel's own" if known else "with whatever runs there, the called function included"
        )
        if not known and found.callee is not None and found.callee.owner in ("op", "extension", "triton"):
            price = msgspec.structs.replace(price, with_call=True)
        evidence = (*evidence, f"cost: {how}, over {story.laps.steps} repeats of the step")
    remedies = found.remedies
    cheap = price.share_of_step is not None and price.high is not None and step and price.high / step < cost.CHEAP
    if cheap and "leave-it" in KINDS[found.kind].remedies:
        words = leave_it("leave it: it was measured to cost under 1 % of the step")
        remedies = (words, *(remedy for remedy in remedies if remedy.id != "leave-it"))
    return msgspec.structs.replace(found, cost=price, evidence=evidence, remedies=remedies)


def _run(story: Story, groups: tuple[Group, ...], run: Run | None) -> Run:
    """How the run ended: what the parent saw of the process, and what the process said itself."""
    base = run or Run(command=story.began.command)
    ended = story.ended
    if ended is not None and (run is None or run.ended in ("ok", "exit")):
        how = ended.how if ended.how in ("exit", "exception", "interrupt") else base.ended
        base = msgspec.structs.replace(
            base,
            ended=how,
            exit_code=ended.exit_code if run is None else run.exit_code,
            detail=ended.detail,
            seconds=ended.seconds if run is None else run.seconds,
        )
    return msgspec.structs.replace(
        base,
        step_us=timeline.step_us(story),
        graphs=story.graphs,
        gaps=sum(group.compiles - group.skipped - group.failures for group in groups),
        frames_skipped=sum(group.skipped for group in groups) + len(story.limits),
    )
