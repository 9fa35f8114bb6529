"""What ``opgraft doctor`` does once its options are read."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import msgspec
from rich.console import Console
from rich.text import Text

from opgraft.diagnostics.conform.doctor import SECONDS, THOROUGH_SECONDS
from opgraft.diagnostics.conform.host import examine_elsewhere
from opgraft.diagnostics.model import Finding, Report
from opgraft.diagnostics.report.checks import checks_html, print_checks

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
        write(json, msgspec.json.format(msgspec.json.encode(made), indent=1))
    if html is not None:
        write(html, page(made).encode())
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


def write(path: Path, content: bytes) -> None:
    """Writes a file in one step: a reader sees the old one or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    with os.fdopen(handle, "wb") as stream:
        stream.write(content)
    os.chmod(name, 0o644)
    os.replace(name, path)


def page(made: Report) -> str:
    """The report as one page: the project's own page where it is there, else the table with the findings."""
    import html as escape
    import importlib

    try:
        render = importlib.import_module("opgraft.diagnostics.report.html").render
        return str(render(made))
    except (ImportError, AttributeError):
        rows = "".join(
            f"<li><b>{escape.escape(f.code)} {escape.escape(f.kind)}</b> {escape.escape(f.message)}"
            f"<pre>{escape.escape(chr(10).join(f.evidence))}</pre></li>"
            for f in made.findings
        )
        return (
            "<!doctype html><html lang='en'><meta charset='utf-8'><title>opgraft doctor</title><body>"
            f"<h1>opgraft doctor</h1><ul>{rows}</ul>{checks_html(made.checks)}</body></html>"
        )
