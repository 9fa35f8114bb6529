"""What ``opgraft doctor`` does once its options are read."""

from __future__ import annotations

import shutil

import msgspec
from rich.console import Console
from rich.markup import escape

from opgraft.diagnostics.collect.explaining import Outputs, Shown, unwritable, write_outputs
from opgraft.diagnostics.conform.doctor import SECONDS, THOROUGH_SECONDS
from opgraft.diagnostics.conform.host import examine_elsewhere
from opgraft.diagnostics.conform.lab import names
from opgraft.diagnostics.model import Report
from opgraft.diagnostics.report.terminal import print_report

SANITIZER = ("compute-sanitizer", "--tool", "memcheck", "--target-processes", "all", "--print-limit", "20")
NO_SANITIZER = "compute-sanitizer is not installed: run without it"
NOTHING_ASKED = "name the ops to examine, or give --import MODULE to examine all that it registers"


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
    errors: Console,
) -> int:
    """Examines the ops, prints the findings and the table, writes the files. Returns the exit code.

    Args:
        ops: names and patterns; empty for what the imports register.
        errors: takes progress and what is wrong with the call.
    """
    trouble = unwritable(outputs) or ("" if ops or imports else NOTHING_ASKED)
    if trouble:
        errors.print(f"opgraft doctor: {trouble}", style="red", soft_wrap=True)
        return 2
    there = shutil.which(SANITIZER[0]) is not None
    limit = seconds or (THOROUGH_SECONDS if thorough else SECONDS)
    with errors.status("importing") as status:
        made = examine_elsewhere(
            ops or (names.NEW,),
            imports=imports,
            device=device,
            thorough=thorough,
            seconds=limit,
            wrap=SANITIZER if sanitizer and there else (),
            progress=lambda name, place, total: status.update(_doing(name, place, total, limit)),
        )
    if sanitizer and not there:
        made = msgspec.structs.replace(made, degraded=(*made.degraded, NO_SANITIZER))
    if not shown.quiet:
        print_report(made, console=console, verbose=shown.verbose, notes=shown.notes, evidence=True)
    written = write_outputs(made, outputs)
    if written:
        console.print(" · ".join(str(path) for path in written), style="dim", highlight=False)
    return 1 if any(finding.severity == "error" for finding in made.findings) or unknown(made) else 0


def _doing(name: str, place: int, total: int, limit: float) -> str:
    """What is going on, with the time left at most."""
    left = (total - place) * limit
    return f"{escape(name)}, {place + 1} of {total}, at most {left // 60:.0f} min {left % 60:.0f} s left"


def unknown(made: Report) -> bool:
    """Was an op not examined at all?"""
    return any(result.check == "all" for result in made.checks)
