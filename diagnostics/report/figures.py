"""Pictures of a comparison, as SVG text: intervals of the arms, and the ledger as a waterfall."""

from __future__ import annotations

import io
import re
from typing import Any

from opgraft.diagnostics.model import Comparison, Ledger

_COLOURS = {"FASTER": "#1a7f37", "SLOWER": "#cf222e", "EQUIVALENT": "#57606a", "UNRESOLVED": "#9a6700"}
_SAVED, _LOST, _TOTAL, _REST = "#1a7f37", "#cf222e", "#24292f", "#8c959f"


def _new(width: float, height: float) -> tuple[Any, Any]:
    # Figure objects of their own: no global state of pyplot, no display, no font cache in the user's settings.
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasSVG(figure)
    axes = figure.add_subplot()
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.tick_params(labelsize=9)
    return figure, axes


def _svg(figure: Any) -> str:
    """The picture without the XML prologue, its text kept as text so that it can be read and searched."""
    from matplotlib import rc_context

    buffer = io.StringIO()
    with rc_context({"svg.fonttype": "none", "font.family": "sans-serif"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    # The size is left to the page: the picture keeps its proportions through the view box.
    return re.sub(r'(<svg[^>]*?) height="[^"]*"|(<svg[^>]*?) width="[^"]*"', lambda m: m[1] or m[2], text, count=2)


def intervals(comparison: Comparison) -> str | None:
    """Ratios to the compiler with their intervals, the A/A run and the band within which arms count as equal."""
    rows: list[tuple[str, float, float, float, str | None]] = [
        (a.name, a.ratio, a.ratio_low, a.ratio_high, a.verdict)
        for a in comparison.arms
        if a.ratio is not None and a.ratio_low is not None and a.ratio_high is not None and a.name != "eager"
    ]
    if comparison.noise_low is not None and comparison.noise_high is not None:
        middle = (comparison.noise_low * comparison.noise_high) ** 0.5
        rows.append(("A/A", middle, comparison.noise_low, comparison.noise_high, None))
    if not rows:
        return None
    figure, axes = _new(7.2, 0.9 + 0.42 * len(rows))
    axes.axvspan(1 / 1.005, 1.005, color="#d0d7de", alpha=0.6, linewidth=0)
    axes.axvline(1.0, color="#57606a", linewidth=0.8)
    for place, (_, ratio, low, high, said) in enumerate(reversed(rows)):
        colour = _COLOURS.get(said or "", "#57606a")
        axes.errorbar(
            [ratio], [place], xerr=[[ratio - low], [high - ratio]], fmt="o", color=colour, capsize=4, markersize=5
        )
        if said:
            axes.annotate(
                said, (high, place), xytext=(8, 0), textcoords="offset points", va="center", fontsize=8, color=colour
            )
    axes.set_yticks(range(len(rows)), [r[0] for r in reversed(rows)])
    axes.set_ylim(-0.6, len(rows) - 0.4)
    axes.set_xlabel("compiler time over arm time: right of 1 is faster; grey is within 0.5 %", fontsize=9)
    axes.margins(x=0.25)
    return _svg(figure)


def waterfall(ledger: Ledger) -> str | None:
    """The terms as steps from 0 to the measured difference."""
    terms = [(t.name, t.us_per_step) for t in ledger.terms if t.us_per_step is not None]
    if not terms:
        return None
    largest = max(abs(ledger.total_us), *(abs(value) for _, value in terms))
    scale, unit = (1e-3, "ms") if largest >= 10_000 else (1.0, "us")
    figure, axes = _new(7.2, 0.9 + 0.38 * (len(terms) + 1))
    level = 0.0
    for place, (name, value) in enumerate(terms):
        colour = _REST if name == "unexplained" else _SAVED if value < 0 else _LOST
        axes.barh(place, value * scale, left=level * scale, color=colour, height=0.6)
        _label(axes, place, level * scale, (level + value) * scale, _signed(value * scale))
        level += value
        axes.plot([level * scale] * 2, [place - 0.3, place + 1.3], color="#57606a", linewidth=0.7)
    axes.barh(len(terms), ledger.total_us * scale, color=_TOTAL, height=0.6)
    _label(axes, len(terms), 0.0, ledger.total_us * scale, _signed(ledger.total_us * scale))
    axes.set_yticks(range(len(terms) + 1), [name for name, _ in terms] + ["the step, measured"])
    axes.invert_yaxis()
    axes.axvline(0.0, color="#24292f", linewidth=0.8)
    axes.set_xlabel(f"{unit} a step; left of 0 is time saved", fontsize=9)
    axes.margins(x=0.15)
    return _svg(figure)


def _signed(value: float) -> str:
    return f"{value:+,.0f}" if abs(value) >= 100 else f"{value:+,.1f}"


def _label(axes: Any, place: int, begin: float, end: float, text: str) -> None:
    axes.annotate(text, (max(begin, end), place), xytext=(5, 0), textcoords="offset points", va="center", fontsize=8)
