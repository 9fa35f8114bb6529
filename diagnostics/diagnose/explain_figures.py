"""``torch._dynamo.explain``'s own figures beside ours, with the reason for the difference in words."""

from __future__ import annotations

from opgraft.diagnostics.model import ExplainFigures, Report


def why_it_differs(figures: tuple[int, int] | None, report: Report) -> ExplainFigures:
    """``figures`` are explain's graphs and breaks, None where it failed."""
    if figures is None:
        return ExplainFigures(
            graph_count=None, graph_break_count=None, why_it_differs="torch._dynamo.explain ends with the error itself"
        )
    graphs, breaks = figures
    return ExplainFigures(graph_count=graphs, graph_break_count=breaks, why_it_differs=words(graphs, breaks, report))


def words(graphs: int, breaks: int, report: Report, later: int = 0) -> str:
    """Why explain's number of breaks is not the number of compile-time events that were seen; "" if they agree.

    ``later`` of those events belong to recompiles, which one call does not show."""
    ours = sum(found.counts.compiles for found in report.findings if is_break(found.code))
    skipped = sum(found.counts.frames_skipped for found in report.findings)
    if breaks == ours and not skipped:
        return ""
    reasons = []
    if later:
        reasons.append(f"it looks at one call and does not see the {later} met when later calls were compiled again")
        ours -= later
    if skipped:
        noun = "frame that runs" if skipped == 1 else "frames that run"
        reasons.append(f"it does not count the {skipped} {noun} wholly in eager")
    if graphs == 0:
        reasons.append(f"it prints graphs minus one, which is {breaks} here")
    elif breaks > ours - skipped:
        reasons.append(
            "it counts graphs minus one, and one break in a called function ends the graph of every caller too"
        )
    elif breaks < ours - skipped:
        reasons.append(
            "it counts graphs minus one, and a break with no tensor operation before or after it makes no graph"
        )
    return "; ".join(reasons)


def is_break(code: str) -> bool:
    return code.startswith("OG1") or code in ("OG201", "OG802")
