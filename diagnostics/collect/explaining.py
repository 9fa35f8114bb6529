"""One run of ``opgraft explain`` from the target to the reports and the exit code."""

from __future__ import annotations

import importlib
import importlib.machinery
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from opgraft.diagnostics.collect.launch import Target, run_watched
from opgraft.diagnostics.collect.meant import advice
from opgraft.diagnostics.model import CheckResult, Finding, Report, Run


@dataclass(frozen=True)
class Outputs:
    """Files to write; None means none."""

    json: Path | None = None
    html: Path | None = None
    sarif: Path | None = None
    markdown: Path | None = None
    events: Path | None = None


@dataclass(frozen=True)
class Shown:
    """What the terminal shows."""

    verbose: bool = False
    notes: bool = False
    quiet: bool = False


def explain_program(
    script: str | None,
    arguments: list[str],
    outputs: Outputs,
    shown: Shown,
    *,
    module: bool = False,
    check_ops: bool = True,
) -> int:
    """Runs, diagnoses, reports; returns the program's exit code. That is 2 where the target cannot be run, and where
    the program went well and a file that was asked for could not be written."""
    target = find_target(script, arguments, module)
    if isinstance(target, str):
        print(f"opgraft explain: {target}", file=sys.stderr)
        return 2
    trouble = unwritable(outputs)
    if trouble:
        print(f"opgraft explain: {trouble}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="opgraft-") as folder:
        events = Path(folder) / "events.jsonl"
        recording = Path(folder) / "recording" if check_ops else None
        run = run_watched(target, events, recording)
        report = report_of(events, run)
        if report.run is not None and report.run.graphs == 0:
            report = msgspec.structs.replace(report, run=msgspec.structs.replace(report.run, advice=advice(target)))
        if recording is not None:
            report = _with_checks(report, recording)
        kept = outputs.events is None or _copy(events, outputs.events)
    written = write_outputs(report, outputs)
    if not shown.quiet:
        _show(report, shown, written)
    wanted = sum(path is not None for path in (outputs.json, outputs.html, outputs.sarif, outputs.markdown))
    return run.exit_code or (0 if kept and len(written) == wanted else 2)


def find_target(script: str | None, arguments: list[str], module: bool = False) -> Target | str:
    """What to run, or a sentence that says why it cannot be. ``script`` names a module where ``module`` says so."""
    if not script:
        return f"give a {'module' if module else 'script'} to run: opgraft explain SCRIPT [ARGS...], or -m MODULE"
    if module:
        if not _importable(script.partition(".")[0]):
            return f"there is no module {script}"
        return Target("module", script, tuple(arguments))
    path, colon, name = script.rpartition(":")
    if colon and path.endswith(".py") and name.isidentifier():
        if not os.path.isfile(path):
            return f"there is no file {path}"
        return Target("function", script, tuple(arguments))
    if script.startswith("-") and not os.path.exists(script):
        return f"there is no option {script}; what is meant for the script comes after it"
    if not os.path.exists(script):
        return f"there is no file {script}"
    if os.path.isdir(script):
        main = Path(script) / "__main__.py"
        return (
            Target("script", str(main), tuple(arguments)) if main.is_file() else f"{script} is a folder, not a script"
        )
    return Target("script", script, tuple(arguments))


def _importable(name: str) -> bool:
    """Is there a module or package of this name where ``python -m`` would look? Nothing is imported."""
    if name in sys.builtin_module_names:
        return True
    return importlib.machinery.PathFinder.find_spec(name, [os.getcwd(), *sys.path]) is not None


def unwritable(outputs: Outputs) -> str:
    """A sentence about the first output that cannot be written, before anything runs; "" if all can."""
    for path in (outputs.json, outputs.html, outputs.sarif, outputs.markdown, outputs.events):
        if path is None:
            continue
        if path.is_dir():
            return f"cannot write {path}: it is a folder"
        if not path.absolute().parent.is_dir():
            return f"cannot write {path}: there is no folder {path.parent}"
        if not os.access(path.absolute().parent, os.W_OK):
            return f"cannot write {path}: its folder may not be written to"
    return ""


def report_of(events: Path, run: Run) -> Report:
    """The report of a stream; of none, if the program died before its first event."""
    from opgraft.diagnostics.collect.events import read_events
    from opgraft.diagnostics.collect.recorder import package_version
    from opgraft.diagnostics.diagnose.report import diagnose

    report = diagnose(read_events(events) if events.exists() else (), run)
    if not report.opgraft:
        report = msgspec.structs.replace(report, opgraft=package_version())
    return report


def write_outputs(report: Report, outputs: Outputs) -> list[Path]:
    """Writes the files that were asked for; returns their paths."""
    written = []
    for path, module, function in (
        (outputs.json, "json", "write_json"),
        (outputs.html, "html", "write_html"),
        (outputs.sarif, "sarif", "write_sarif"),
        (outputs.markdown, "markdown", "write_markdown"),
    ):
        if path is None:
            continue
        write: Callable[[Report, Path], None] = getattr(
            importlib.import_module(f"opgraft.diagnostics.report.{module}"), function
        )
        try:
            write(report, path)
            written.append(path)
        except OSError as error:
            print(f"opgraft explain: cannot write {path}: {error.strerror}", file=sys.stderr)
    return written


def _with_checks(report: Report, recording: Path) -> Report:
    """The report with what the doctor says of the custom ops that the run called; unchanged where it says nothing."""
    try:
        check: Any = importlib.import_module("opgraft.diagnostics.conform.recorded").check_recorded_calls
    except (ImportError, AttributeError):
        return report
    if not recording.exists():
        return report
    try:
        found: tuple[tuple[Finding, ...], tuple[CheckResult, ...]] = check(recording)
    except Exception as error:
        degraded = (*report.degraded, f"custom ops were not checked: {type(error).__name__}: {error}")
        return msgspec.structs.replace(report, degraded=degraded)
    from opgraft.diagnostics.diagnose.merge import merge

    return merge(report, *found)


def _copy(source: Path, target: Path) -> bool:
    """True where the copy was written."""
    from opgraft.diagnostics.report.files import write_atomically

    try:
        write_atomically(target, source.read_bytes() if source.exists() else b"")
    except OSError as error:
        print(f"opgraft explain: cannot write {target}: {error.strerror}", file=sys.stderr)
        return False
    return True


def _show(report: Report, shown: Shown, written: list[Path]) -> None:
    from rich.console import Console

    from opgraft.diagnostics.report.terminal import print_report

    sys.stdout.flush()
    console = Console(stderr=True)
    console.print()
    print_report(report, console=console, verbose=shown.verbose, notes=shown.notes)
    if written:
        console.print(" · ".join(str(path) for path in written), style="dim", highlight=False)
