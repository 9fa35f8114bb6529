"""The report as Markdown, for a pull request or an issue."""

from __future__ import annotations

import re
from pathlib import Path

from opgraft.diagnostics.model import Finding, Report
from opgraft.diagnostics.report.files import write_atomically
from opgraft.diagnostics.report.terminal import count_words, ending, explain_line, headline, nothing


def write_markdown(report: Report, path: Path | str) -> None:
    """Writes the report, whole or not at all."""
    write_atomically(Path(path), to_markdown(report).encode())


def to_markdown(report: Report) -> str:
    """Headline, then a section a finding. Text of the run is escaped or fenced."""
    parts = [f"## opgraft\n\n{escape(headline(report).plain)}"]
    if ending(report):
        parts.append(escape(ending(report)))
    if explain_line(report):
        parts.append(escape(explain_line(report)))
    parts += [_section(found) for found in report.findings] or [nothing(report).plain]
    return "\n\n".join(parts) + "\n"


def _section(found: Finding) -> str:
    callee = f" {code(found.callee.name)}" if found.callee is not None and found.callee.name else ""
    counts = f" ({count_words(found)})" if count_words(found) else ""
    lines = [f"### {found.severity}: {found.code} {found.kind}{callee}{counts}", ""]
    if found.location.line:
        lines += [code(f"{found.location.path}:{found.location.line}"), "", fence(found.location.text.strip()), ""]
    lines += [escape(found.message), ""]
    lines += [f"- **{remedy.id}**: {escape(remedy.text)}" for remedy in found.remedies]
    return "\n".join(lines)


def escape(text: str) -> str:
    """Text without meaning to Markdown or HTML."""
    return re.sub(r"([\\`*_{}\[\]<>#|])", r"\\\1", text)


def code(text: str) -> str:
    """A code span that its own backticks cannot end."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    ticks = "`" * (longest + 1)
    pad = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{ticks}{pad}{text}{pad}{ticks}"


def fence(text: str) -> str:
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    ticks = "`" * max(3, longest + 1)
    return f"{ticks}python\n{text}\n{ticks}"
