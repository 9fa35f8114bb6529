"""What ``opgraft compare`` does once its options are read."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

from opgraft.diagnostics.measure import compare as measuring
from opgraft.diagnostics.measure.source import load_build
from opgraft.diagnostics.measure.subject import built
from opgraft.diagnostics.model import Report


def run(
    target: str,
    *,
    without: tuple[str, ...],
    json: Path | None,
    html: Path | None,
    seconds: float,
    train: bool,
    mode: str | None,
    arms: tuple[str, ...] | None,
    device: str | None,
) -> int:
    """Compares and prints; returns the exit code: 0 where something was measured, 2 where the call was wrong."""
    console = Console()
    errors = Console(stderr=True)
    try:
        subject = built(load_build(target), train=train, device=device)
        with _bar(errors) as bar:
            task = bar.add_task("starting", total=1.0)
            report = measuring.compare(
                subject.model,
                {**subject.kwargs} if subject.kwargs else subject.args,
                without,
                arms=arms,
                train=train,
                loss=subject.loss,
                seconds=seconds,
                compile_options={"mode": mode} if mode else None,
                progress=lambda message, share: bar.update(task, description=message, completed=share),
            )
    except (LookupError, TypeError, ValueError, FileNotFoundError) as error:
        errors.print(f"[red]opgraft compare:[/red] {error}", highlight=False)
        return 2
    show(report, console)
    write(report, json, html)
    return 0


def _bar(console: Console) -> Progress:
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
    )


def show(report: Report, console: Console) -> None:
    from opgraft.diagnostics.report.terminal import print_report

    print_report(report, console=console)


def write(report: Report, json: Path | None, html: Path | None) -> None:
    if json is not None:
        from opgraft.diagnostics.report.json import write_json

        write_json(report, json)
    if html is not None:
        from opgraft.diagnostics.report.html import write_html

        write_html(report, html)
