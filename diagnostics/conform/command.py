"""What ``opgraft doctor`` does once its options are read."""

from __future__ import annotations

import shutil
from pathlib import Path

from rich.console import Console
from rich.text import Text

from opgraft.diagnostics.conform.doctor import SECONDS, THOROUGH_SECONDS
from opgraft.diagnostics.conform.host import examine_elsewhere
from opgraft.diagnostics.model import Finding, Report
from opgraft.diagnostics.report.checks import print_checks
from opgraft.diagnostics.report.html import write_html
from opgraft.diagnostics.report.json import write_json

SANITIZER = ("compute-sanitizer", "--tool", "memcheck", "--target-processes", "all", "--print-limit", "20")
_COLOUR = {"error": "bold red", "warning": "yellow", "note": "cyan"}


def run(
    ops: tuple[str, ...],
    *,
    imports: tuple[str, ...],
    json: Path | None,
    html: Path | None,
    thorough: bool,
    sanitizer: bool,
    device: str,
    seconds: float | None,
    console: Console,
) -> int:
    """Examines the ops, prints the findings and the table, writes the files. Returns the exit code."""
    wrap: tuple[str, ...] = ()
    if sanitizer:
        if shutil.which(SANITIZER[0]) is None:
            console.print("compute-sanitizer is not installed: running without it", style="yellow")
        else:
            wrap = SANITIZER
    limit = seconds or (THOROUGH_SECONDS if thorough else SECONDS)
    made = examine_elsewhere(ops, imports=imports, device=device, thorough=thorough, seconds=limit, wrap=wrap)
    for finding in made.findings:
        print_finding(finding, console)
    print_checks(made.checks, console)
    for line in made.degraded:
        console.print(Text(line))
    if json is not None:
        json.parent.mkdir(parents=True, exist_ok=True)
        write_json(made, json)
    if html is not None:
        html.parent.mkdir(parents=True, exist_ok=True)
        write_html(made, html)
    return 1 if any(finding.severity == "error" for finding in made.findings) or unknown(made) else 0


def unknown(made: Report) -> bool:
    return any(result.check == "all" for result in made.checks)


def print_finding(finding: Finding, console: Console) -> None:
    """One finding: severity, code and kind, the sentence, where, what speaks for it, what to do."""
    head = Text(f"{finding.severity.upper():8}", style=_COLOUR[finding.severity])
    head.append(f"{finding.code} {finding.kind}  ", style="bold")
    head.append(finding.message)
    console.print(head)
    console.print(Text(f"  {finding.location.path}:{finding.location.line}", style="dim"))
    for line in finding.evidence:
        console.print(Text("  " + line.replace("\n", "\n    ")))
    for remedy in finding.remedies:
        console.print(Text(f"  → {remedy.text}  [{remedy.id}]", style="green"))
    console.print()
