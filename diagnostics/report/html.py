"""The report as one HTML file that needs nothing else: no network, no fonts, a few lines of script for keys and
filters."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from opgraft.diagnostics.model import Finding, Location, Region, Report
from opgraft.diagnostics.report.files import write_atomically
from opgraft.diagnostics.report.terminal import count, count_words, duration, ending, explain_line, nothing, shown_path

_MOST_BARS = 400
_SEVERITIES = ("error", "warning", "note")


@dataclass(frozen=True)
class Tile:
    value: str
    label: str
    tone: str = ""


@dataclass(frozen=True)
class Bar:
    """One part of the timeline; ``weight`` is its share of the width."""

    kind: str
    name: str
    title: str
    where: str
    ops: str
    time: str
    weight: float
    finding: int | None


@dataclass(frozen=True)
class Card:
    found: Finding
    where: str
    callee: str
    owner: str
    counts: str
    before: str
    marked: str
    after: str


def write_html(report: Report, path: Path | str) -> None:
    """Writes the page, whole or not at all."""
    write_atomically(Path(path), to_html(report).encode())


def to_html(report: Report) -> str:
    """The page. Every text of the report is escaped by the template."""
    import jinja2

    environment = jinja2.Environment(autoescape=True, trim_blocks=True, undefined=jinja2.StrictUndefined)
    source = files("opgraft.diagnostics.report").joinpath("page.html").read_text(encoding="utf-8")
    shown = report.regions[:_MOST_BARS]
    scaled = bool(shown) and all(r.us_per_step is not None for r in shown if r.kind == "graph")
    bars = tuple(_bar(region, scaled) for region in shown)
    command = " ".join(report.run.command) if report.run is not None else ""
    return environment.from_string(source).render(
        report=report,
        shown_path=shown_path,
        title=f"opgraft · {command}" if command else "opgraft report",
        heading=command or "opgraft report",
        ended=ending(report),
        tiles=_tiles(report),
        explain_line=explain_line(report),
        bars=bars,
        scaled=scaled,
        bar_label=f"{count(len(bars), 'part')}: " + "; ".join(bar.title for bar in bars[:40]),
        has_skipped=any(bar.kind == "skipped-frame" for bar in bars),
        more_bars=max(0, len(report.regions) - _MOST_BARS),
        cards=tuple(_card(found) for found in report.findings),
        severities=[(s, n) for s in _SEVERITIES if (n := sum(f.severity == s for f in report.findings))],
        nothing=nothing(report).plain,
        comparison=_part("comparison", "comparison_html", report.ledger),
        checks=_part("checks", "checks_html", report.checks),
    )


def _part(module: str, function: str, part: Any) -> Any:
    """A fragment of another module, which escapes its own texts; empty where there is nothing to show."""
    import markupsafe

    if not part:
        return ""
    try:
        render = getattr(importlib.import_module(f"opgraft.diagnostics.report.{module}"), function)
    except (ImportError, AttributeError):
        return ""
    return markupsafe.Markup(render(part))


def _tiles(report: Report) -> list[Tile]:
    tiles = []
    run = report.run
    if run is not None:
        if run.step_us is not None:
            tiles.append(Tile(duration(run.step_us), "a step" if report.device == "cpu" else "a step on the host"))
        tiles.append(Tile(str(run.graphs), "graphs" if run.graphs != 1 else "graph"))
        tiles.append(
            Tile(str(run.gaps), "gaps in eager" if run.gaps != 1 else "gap in eager", "warn" if run.gaps else "")
        )
        if run.frames_skipped:
            label = "frames never compiled" if run.frames_skipped != 1 else "frame never compiled"
            tiles.append(Tile(str(run.frames_skipped), label, "bad"))
    for severity, label, tone in (("error", "faults", "bad"), ("warning", "causes", "warn"), ("note", "notes", "")):
        number = sum(found.severity == severity for found in report.findings)
        if number:
            tiles.append(Tile(str(number), label if number != 1 else label[:-1], tone))
    return tiles


def _bar(region: Region, scaled: bool) -> Bar:
    where = f"{shown_path(region.location.path)}:{region.location.line}" if region.location is not None else ""
    name = {"graph": region.name, "gap": "gap in eager", "skipped-frame": f"{region.name} (never compiled)"}[
        region.kind
    ]
    time = duration(region.us_per_step) if region.us_per_step is not None else ""
    title = ", ".join(words for words in (name, where, time) if words)
    weight = region.us_per_step if scaled and region.us_per_step is not None else 0.0 if scaled else 1.0
    if not scaled and region.kind == "gap":
        weight = 0.4
    return Bar(
        kind=region.kind,
        name=name,
        title=title,
        where=where,
        ops=str(region.ops) if region.kind == "graph" else "",
        time=time or "not measured",
        weight=round(max(weight, 0.001), 3),
        finding=region.finding,
    )


def _card(found: Finding) -> Card:
    before, marked, after = split_span(found.location)
    callee = found.callee
    owner = ""
    if callee is not None:
        owner = callee.distribution
        if owner in ("", "unknown"):
            owner = callee.owner if callee.owner in ("torch", "user") else f"{callee.owner}, package unknown"
    return Card(
        found=found,
        where=f"{shown_path(found.location.path)}:{found.location.line}"
        + (f" in {found.location.function}" if found.location.function else ""),
        callee=callee.name if callee is not None else "",
        owner=owner,
        counts=count_words(found),
        before=before,
        marked=marked,
        after=after,
    )


def split_span(place: Location) -> tuple[str, str, str]:
    """The source line before, in and after the span; all of it is in the middle where no span is known."""
    text = place.text.rstrip()
    if place.column is None:
        return "", text.strip(), ""
    lead = len(text) - len(text.lstrip())
    start = max(place.column, lead)
    end = place.end_column if place.end_column is not None and place.end_line in (None, place.line) else len(text)
    return text[lead:start], text[start:end], text[end:]
