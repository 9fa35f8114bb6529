"""What ``opgraft compare`` does once its options are read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

from opgraft.diagnostics.measure.compare import compare_file
from opgraft.diagnostics.model import Report


def run(target: str, *, json: Path | None, html: Path | None, notes: bool, **options: Any) -> int:
    """Compares and prints; returns the exit code: 0 where something was measured, 1 where nothing was, 2 where the
    call was wrong. ``options`` are those of ``compare_file``."""
    console, errors = Console(), Console(stderr=True)
    try:
        with _bar(errors) as bar:
            task = bar.add_task("starting", total=1.0)
            report = compare_file(
                target,
                progress=lambda message, share: bar.update(task, description=message, completed=share),
                **options,
            )
    except (LookupError, TypeError, ValueError, FileNotFoundError) as error:
        errors.print("[red]opgraft compare:[/red]", str(error), highlight=False, markup=True, soft_wrap=True)
        return 2
    show(report, console, notes)
    write(report, json, html)
    return 0 if report.ledger is not None and report.ledger.arms else 1


def _bar(console: Console) -> Progress:
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
    )


def show(report: Report, console: Console, notes: bool = False) -> None:
    """The comparison first, then what was found."""
    from opgraft.diagnostics.report.comparison import print_comparison
    from opgraft.diagnostics.report.terminal import print_report

    if report.ledger is not None:
        print_comparison(report.ledger, console)
    shown = [f for f in report.findings if notes or f.severity != "note"]
    if shown:
        console.print()
        print_report(msgspec.structs.replace(report, ledger=None), console=console, notes=notes)
    elif report.findings:
        hidden = len(report.findings)
        console.print(f"\n{hidden} note{'s' if hidden > 1 else ''} hidden (--notes)", style="dim")


def write(report: Report, json: Path | None, html: Path | None) -> None:
    if json is not None:
        from opgraft.diagnostics.report.json import write_json

        write_json(report, json)
    if html is not None:
        from opgraft.diagnostics.report.html import write_html

        write_html(report, html)
