"""Events -> report: the whole diagnosis."""

from __future__ import annotations

from collections.abc import Iterable

from opgraft.diagnostics.collect.events import Event
from opgraft.diagnostics.diagnose import cudagraph_skip, explain_figures, recompile, stale_cache, timeline
from opgraft.diagnostics.diagnose.gather import Groups, finding, sort_key
from opgraft.diagnostics.diagnose.rules import judge
from opgraft.diagnostics.diagnose.story import Reader, Story
from opgraft.diagnostics.model import ExplainFigures, Finding, Report, Run


def diagnose(stream: Iterable[Event], run: Run | None = None) -> Report:
    """Reads a stream once and reports. ``run`` is what the parent process knows of how the run ended."""
    reader = Reader()
    groups = Groups()
    limit_hit: dict[str, int] = {}
    for incident in reader.incidents(stream):
        if incident.gb_type.startswith(recompile.LIMIT):
            path = incident.location.path
            limit_hit[path] = limit_hit.get(path, 0) + 1
        else:
            groups.add(incident, judge(incident))
    story = reader.story
    found = [finding(group, timeline.per_step(story, group.own_ids or group.ids)) for group in groups.groups()]
    found = recompile.conclude(story, found, limit_hit)
    found += stale_cache.conclude(story) + cudagraph_skip.conclude(story)
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
        device=story.began.device,
        findings=findings,
        run=_run(story, findings, run),
        regions=timeline.regions(story, by_id),
        degraded=story.began.missing,
    )
    graphs, breaks = timeline.explain_would_say(story)
    import msgspec

    return msgspec.structs.replace(
        report,
        explain=ExplainFigures(
            graph_count=graphs,
            graph_break_count=breaks,
            why_it_differs=explain_figures.words(graphs, breaks, report),
        ),
    )


def _run(story: Story, findings: tuple[Finding, ...], run: Run | None) -> Run:
    base = run or Run(command=story.began.command)
    if story.ended is not None and run is None:
        how = story.ended.how
        base = Run(
            command=story.began.command,
            ended=how if how in ("ok", "exit", "exception", "interrupt") else "ok",  # type: ignore[arg-type]
            exit_code=story.ended.exit_code,
            detail=story.ended.detail,
            seconds=story.ended.seconds,
        )
    import msgspec

    breaks = [f for f in findings if explain_figures.is_break(f.code)]
    return msgspec.structs.replace(
        base,
        step_us=timeline.step_us(story),
        graphs=story.graphs,
        gaps=sum(f.counts.compiles - f.counts.frames_skipped for f in breaks),
        frames_skipped=sum(f.counts.frames_skipped for f in breaks),
    )
