"""The report for a terminal: worst first, source marked as compilers mark it, one screen for a typical model."""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from opgraft.diagnostics.model import Cost, Finding, Location, Report

_STYLE = {"error": "bold red", "warning": "yellow", "note": "cyan"}
_WORD = {"error": "ERROR", "warning": "WARN ", "note": "NOTE "}


def print_report(
    report: Report, *, console: Console | None = None, verbose: bool = False, notes: bool = False
) -> None:
    """Prints the report. ``verbose`` adds stacks, torch's own messages and evidence; ``notes`` shows what is no more
    than a note."""
    console = console or Console()
    console.print(_headline(report))
    said = _explain_line(report)
    if said:
        console.print(Text(said, style="dim"))
    shown = [found for found in report.findings if notes or found.severity != "note"]
    for found in shown:
        console.print()
        _print_finding(found, console, verbose)
    hidden = len(report.findings) - len(shown)
    if not report.findings:
        console.print(_nothing(report))
    if report.degraded:
        console.print(Text(f"not seen with this torch: {'; '.join(report.degraded)}", style="dim"))
    if hidden:
        console.print()
        console.print(Text(f"{hidden} note{'s' if hidden > 1 else ''} hidden (--notes)", style="dim"))
    _print_part("opgraft.diagnostics.report.comparison", "print_comparison", report.ledger, console)
    _print_part("opgraft.diagnostics.report.checks", "print_checks", report.checks, console)


def _print_part(module: str, function: str, part: object, console: Console) -> None:
    if not part:
        return
    try:
        printer = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError):
        return
    console.print()
    printer(part, console)


def _headline(report: Report) -> Text:
    run = report.run
    words: list[str] = []
    if run is not None:
        if run.step_us is not None:
            words.append(f"step {duration(run.step_us)}")
        words.append(f"{count(run.graphs, 'graph')}, {count(run.gaps, 'gap')} in eager")
        if run.frames_skipped:
            words.append(f"{count(run.frames_skipped, 'frame')} never compiled")
    causes = sum(1 for found in report.findings if found.severity == "warning")
    faults = sum(1 for found in report.findings if found.severity == "error")
    if causes:
        words.append(count(causes, "cause"))
    if faults:
        words.append(count(faults, "fault"))
    line = Text(" · ".join(words) or "no run", style="bold")
    line.append(f"   torch {report.torch or '?'} · {report.device}", style="dim")
    return line


def _explain_line(report: Report) -> str:
    figures = report.explain
    if figures is None or not figures.why_it_differs:
        return ""
    if figures.graph_break_count is None:
        return figures.why_it_differs
    return f"torch._dynamo.explain would say {count(figures.graph_break_count, 'break')}: {figures.why_it_differs}"


def _nothing(report: Report) -> Text:
    if report.run is not None and report.run.graphs == 0:
        return Text("Nothing was compiled in this run.")
    return Text("No graph breaks, no failed compiles.", style="green")


def _print_finding(found: Finding, console: Console, verbose: bool) -> None:
    width = console.width
    head = Text()
    head.append(f"{_WORD[found.severity]} {found.code} {found.kind}", style=_STYLE[found.severity])
    if found.callee is not None and found.callee.name:
        head.append(f"   {found.callee.name}", style="bold")
        if found.callee.distribution not in ("", "unknown"):
            head.append(f" ({found.callee.distribution})")
        elif found.callee.owner == "extension":
            head.append(" (shipped by an unknown package)", style="dim")
    head.append(f"   {_counts(found)}", style="dim")
    console.print(head)
    for line in excerpt(found.location, width):
        console.print(line)
    console.print(Text(found.message), soft_wrap=False, style=None, width=max(20, width - 2))
    for remedy in found.remedies[: None if verbose else 2]:
        text = Text("  → ", style="green")
        text.append(remedy.text)
        text.append(f"  [{remedy.id}]", style="dim")
        console.print(text)
    if verbose:
        _print_details(found, console)


def _print_details(found: Finding, console: Console) -> None:
    for frame in found.stack:
        console.print(Text(f"    {shown_path(frame.path)}:{frame.line} in {frame.function}   {frame.text.strip()}", style="dim"))
    for cause in found.causes:
        console.print(Text(f"    torch: {cause.gb_type} — {' '.join(cause.context.split())[:200]}", style="dim"))
    for line in found.evidence:
        console.print(Text(f"    · {line}", style="dim"))


def excerpt(place: Location, width: int) -> tuple[Text, ...]:
    """``path:line   source`` and a line of carets under the span."""
    if not place.line:
        return ()
    prefix = f"  {shown_path(place.path)}:{place.line}   "
    stripped = place.text.strip()
    indent = len(place.text) - len(place.text.lstrip())
    room = max(20, width - len(prefix))
    cut = stripped if len(stripped) <= room else stripped[: room - 1] + "…"
    lines = [Text(prefix, style="blue") + Text(cut)]
    if place.column is not None and stripped:
        start = max(0, place.column - indent)
        end = place.end_column - indent if place.end_column is not None and place.end_line in (None, place.line) else None
        end = min(end if end is not None else len(stripped), room)
        if end > start:
            lines.append(Text(" " * (len(prefix) + start) + "^" * (end - start), style="red"))
    return tuple(lines)


def _counts(found: Finding) -> str:
    counts = found.counts
    words = []
    if counts.sites > 1:
        words.append(count(counts.sites, "site"))
    if counts.compiles > 1:
        words.append(count(counts.compiles, "compile"))
    if counts.frames_skipped:
        words.append(f"{count(counts.frames_skipped, 'frame')} never compiled")
    if counts.per_step is not None:
        words.append(f"{counts.per_step} x a step")
    cost = cost_words(found.cost)
    return " · ".join([*words, cost] if cost else words)


def cost_words(cost: Cost) -> str:
    """The cost a step in words, "" where it is unknown."""
    if cost.us_per_step is None:
        return ""
    words = f"{duration(cost.us_per_step)} a step"
    if cost.low is not None and cost.high is not None:
        words += f" ({duration(cost.low)} to {duration(cost.high)})"
    if cost.share_of_step is not None:
        words += f", {cost.share_of_step:.1%} of the step" if cost.share_of_step >= 0.01 else ", under 1 % of the step"
    return words


def duration(microseconds: float) -> str:
    """Microseconds with the unit that reads best."""
    if abs(microseconds) >= 1e6:
        return f"{microseconds / 1e6:.2f} s"
    if abs(microseconds) >= 1e3:
        return f"{microseconds / 1e3:.2f} ms"
    return f"{microseconds:.0f} us"


def count(number: int, noun: str) -> str:
    """``1 graph``, ``2 graphs``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def shown_path(path: str) -> str:
    """The path as the reader would type it: relative where it lies below the working directory."""
    relative = os.path.relpath(path) if path.startswith("/") else path
    return path if relative.startswith("../..") else relative


def join(words: Sequence[str]) -> str:
    return ", ".join(words)
