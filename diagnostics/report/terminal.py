"""The report for a terminal: worst first, source marked as compilers mark it, one screen for a typical model."""

from __future__ import annotations

import importlib
import os

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from opgraft.diagnostics.model import Cost, Finding, Location, Report

_STYLE = {"error": "bold red", "warning": "yellow", "note": "cyan"}
_WORD = {"error": "ERROR", "warning": "WARN ", "note": "NOTE "}


def print_report(
    report: Report,
    *,
    console: Console | None = None,
    verbose: bool = False,
    notes: bool = False,
    evidence: bool = False,
) -> None:
    """Prints the report. ``verbose`` adds stacks, torch's own messages and evidence; ``notes`` shows what is no more
    than a note; ``evidence`` alone adds what speaks for each finding, such as the script that shows it."""
    console = console or Console()
    console.print(headline(report))
    ended = ending(report)
    if ended:
        console.print(Text(ended, style="yellow"))
    said = explain_line(report)
    if said:
        console.print(Text(said, style="dim"))
    shown = [found for found in report.findings if notes or found.severity != "note"]
    for found in shown:
        console.print()
        _print_finding(found, console, verbose, evidence)
    hidden = len(report.findings) - len(shown)
    if not report.findings:
        console.print(nothing(report))
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


def headline(report: Report) -> Text:
    run = report.run
    words: list[str] = []
    if run is not None:
        if run.step_us is not None:
            # Nothing waits for a GPU while a program is watched, so there the clock sees the host alone.
            host = "" if report.device == "cpu" else " on the host"
            words.append(f"step {duration(run.step_us)}{host}")
        words.append(f"{count(run.graphs, 'graph')}, {count(run.gaps, 'gap')} in eager")
        if run.frames_skipped:
            words.append(f"{count(run.frames_skipped, 'frame')} never compiled")
    causes = sum(1 for found in report.findings if found.severity == "warning")
    faults = sum(1 for found in report.findings if found.severity == "error")
    if causes:
        words.append(count(causes, "cause"))
    if faults:
        words.append(count(faults, "fault"))
    if run is None and report.checks:
        words.insert(0, f"{count(len({result.op for result in report.checks}), 'op')} examined")
    line = Text(" · ".join(words) or "no run", style="bold")
    line.append(
        f"   {f'torch {report.torch}' if report.torch else 'torch not imported'} · {report.device}", style="dim"
    )
    return line


def ending(report: Report) -> str:
    """How the run ended, where it did not end well; the report holds what was seen up to there."""
    run = report.run
    if run is None or run.ended == "ok" or (run.ended == "exit" and run.exit_code == 0):
        return ""
    words = {
        "exit": f"The program ended with exit code {run.exit_code}",
        "exception": f"The program ended with {run.detail}" if run.detail else "The program ended with an exception",
        "signal": f"The program was ended by {run.detail or 'a signal'}",
        "interrupt": "The program was interrupted",
        "timeout": "The program ran out of time",
    }[run.ended]
    return f"{words}; this is what was seen up to there."


def explain_line(report: Report) -> str:
    """What torch's own explain says and why it differs, "" where it agrees."""
    figures = report.explain
    if figures is None or not figures.why_it_differs:
        return ""
    if figures.graph_break_count is None:
        return figures.why_it_differs
    return f"torch._dynamo.explain would say {count(figures.graph_break_count, 'break')}: {figures.why_it_differs}"


def nothing(report: Report) -> Text:
    """What to say where there is no finding."""
    if report.run is None and report.checks:
        tried = sum(result.outcome in ("pass", "fail") for result in report.checks)
        if not tried:
            return Text("No check was made; the table says why.", style="yellow")
        return Text(f"{count(tried, 'check')} made, nothing found.", style="green")
    if report.run is not None and report.run.graphs == 0:
        words = "Nothing was compiled in this run."
        return Text(f"{words} {report.run.advice}" if report.run.advice else words)
    return Text("No graph breaks, no failed compiles.", style="green")


def _print_finding(found: Finding, console: Console, verbose: bool, evidence: bool = False) -> None:
    width = console.width
    head = Text()
    head.append(f"{_WORD[found.severity]} {found.code} {found.kind}", style=_STYLE[found.severity])
    if found.callee is not None and found.callee.name:
        head.append(f"   {found.callee.name}", style="bold")
        if found.callee.distribution not in ("", "unknown"):
            head.append(f" ({found.callee.distribution})")
        elif found.callee.owner == "extension":
            head.append(" (shipped by an unknown package)", style="dim")
    head.append(f"   {count_words(found)}", style="dim")
    console.print(head)
    for line in excerpt(found.location, width):
        console.print(line)
    console.print(Padding(Text(found.message), (0, 0, 0, 2)))
    for remedy in found.remedies[: None if verbose else 2]:
        text = Text(remedy.text)
        text.append(f"  [{remedy.id}]", style="dim")
        console.print(_bulleted("→", text))
    if verbose:
        _print_details(found, console)
    elif evidence:
        _print_evidence(found, console)


def _bulleted(sign: str, text: Text) -> Table:
    table = Table.grid(padding=(0, 1, 0, 0))
    table.add_column(width=3, justify="right")
    table.add_column()
    table.add_row(Text(sign, style="green"), text)
    return table


def _print_details(found: Finding, console: Console) -> None:
    for frame in found.stack:
        text = f"    {shown_path(frame.path)}:{frame.line} in {frame.function}   {frame.text.strip()}"
        console.print(Text(text, style="dim", no_wrap=True, overflow="ellipsis"))
    for cause in found.causes:
        console.print(
            _bulleted("", Text(f"torch: {cause.gb_type} — {' '.join(cause.context.split())[:200]}", style="dim"))
        )
    _print_evidence(found, console)


def _print_evidence(found: Finding, console: Console) -> None:
    for line in found.evidence:
        first, *script = line.splitlines() or [""]
        console.print(_bulleted("·", Text(first, style="dim")))
        for row in script:
            # A script is there to be copied: no line of it is broken.
            console.print(Text(f"      {row}", style="dim"), soft_wrap=True)


def excerpt(place: Location, width: int) -> tuple[Text, ...]:
    """``path:line   source`` with carets under the span; the source goes on its own line where both are too wide."""
    if not place.line:
        return ()
    prefix = f"  {shown_path(place.path)}:{place.line}"
    source = place.text.strip()
    lines: list[Text] = []
    if len(prefix) + 3 + len(source) <= width:
        lead = len(prefix) + 3
        lines.append(Text(f"{prefix}   ", style="blue") + Text(source))
    else:
        lead = 6
        source = source if len(source) <= width - lead else source[: width - lead - 1] + "…"
        lines += [Text(prefix, style="blue", overflow="fold"), Text(" " * lead) + Text(source)]
    if not place.text.strip():
        return (Text(prefix, style="blue"),)
    start, end = _span(place, len(source))
    if end > start:
        lines.append(Text(" " * (lead + start) + "^" * (end - start), style="red"))
    return tuple(lines)


def _span(place: Location, length: int) -> tuple[int, int]:
    """Columns of the span in the stripped line, cut at its length; (0, 0) where no span is known."""
    if place.column is None:
        return 0, 0
    indent = len(place.text) - len(place.text.lstrip())
    end = length
    if place.end_column is not None and place.end_line in (None, place.line):
        end = min(length, place.end_column - indent)
    return max(0, place.column - indent), end


def count_words(found: Finding) -> str:
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
    words = f"{'at most ' if cost.with_call else ''}{duration(cost.us_per_step)} a step"
    if cost.low is not None and cost.high is not None:
        words += f" ({duration(cost.low)} to {duration(cost.high)})"
    if cost.share_of_step is not None:
        words += f", {cost.share_of_step:.1%} of the step" if cost.share_of_step >= 0.01 else ", under 1 % of the step"
    return f"{words}, the call itself included" if cost.with_call else words


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
