"""What ``opgraft doctor`` does once its options are read."""

from __future__ import annotations

import shutil

import msgspec
from rich.console import Console

from opgraft.diagnostics.collect.explaining import Outputs, Shown, unwritable, write_outputs
from opgraft.diagnostics.conform.doctor import SECONDS, THOROUGH_SECONDS
from opgraft.diagnostics.conform.host import examine_elsewhere
from opgraft.diagnostics.model import Report
from opgraft.diagnostics.report.terminal import print_report

SANITIZER = ("compute-sanitizer", "--tool", "memcheck", "--target-processes", "all", "--print-limit", "20")
NO_SANITIZER = "compute-sanitizer is not installed: run without it"


def run(
    ops: tuple[str, ...],
    *,
    imports: tuple[str, ...],
    outputs: Outputs,
    shown: Shown,
    thorough: bool,
    sanitizer: bool,
    device: str,
    seconds: float | None,
    console: Console,
) -> int:
    """Examines the ops, prints the findings and the table, writes the files. Returns the exit code."""
    trouble = unwritable(outputs)
    if trouble:
        console.print(f"opgraft doctor: {trouble}", style="red")
        return 2
    there = shutil.which(SANITIZER[0]) is not None
    limit = seconds or (THOROUGH_SECONDS if thorough else SECONDS)
    made = examine_elsewhere(
        ops,
        imports=imports,
        device=device,
        thorough=thorough,
        seconds=limit,
        wrap=SANITIZER if sanitizer and there else (),
    )
    if sanitizer and not there:
        made = msgspec.structs.replace(made, degraded=(*made.degraded, NO_SANITIZER))
    if not shown.quiet:
        print_report(made, console=console, verbose=shown.verbose, notes=shown.notes, evidence=True)
    written = write_outputs(made, outputs)
    if written:
        console.print(" · ".join(str(path) for path in written), style="dim", highlight=False)
    return 1 if any(finding.severity == "error" for finding in made.findings) or unknown(made) else 0


def unknown(made: Report) -> bool:
    """Was an op not examined at all?"""
    return any(result.check == "all" for result in made.checks)
