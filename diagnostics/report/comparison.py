"""A comparison for people: the table of arms and the ledger in the terminal, and the same with pictures in HTML."""

from __future__ import annotations

import html
import math
from collections.abc import Callable

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from opgraft.diagnostics.measure.prose import data, reliable, us
from opgraft.diagnostics.model import ArmResult, Comparison, Ledger, LedgerTerm, Prediction

_RATIO = "against compiler"
_STYLE = {"FASTER": "bold green", "SLOWER": "bold red", "EQUIVALENT": "bold", "UNRESOLVED": "yellow"}


def print_comparison(comparison: Comparison, console: Console) -> None:
    """Prints the table, the noise floor, the ledgers and the paragraph."""
    for part in renderables(comparison, console.width):
        console.print(part)


def renderables(comparison: Comparison, width: int) -> list[RenderableType]:
    parts: list[RenderableType] = [arm_table(comparison, width)] if comparison.arms else []
    parts += [Text(f"{arm.name} failed: {arm.failed}", style="red") for arm in comparison.arms if arm.failed]
    parts.append(_facts(comparison))
    for ledger in comparison.ledgers:
        parts += [Text(), ledger_table(ledger, width)]
    parts += [Text(prediction_text(one), style="dim") for one in comparison.predictions]
    if comparison.sentence:
        parts += [Text(), Text(comparison.sentence)]
    return parts


def arm_table(comparison: Comparison, width: int) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2 if width >= 100 else 1, 0, 0), header_style="dim")
    table.add_column("", no_wrap=True)
    rows = list(comparison.arms)
    columns = [c for c in _columns(rows) if width >= 100 or c[0] not in ("host", "graphs")]
    for title, _, _ in columns:
        table.add_column(title, justify="right", no_wrap=True)
    for arm in rows:
        if arm.failed:
            table.add_row(arm.name, *["" for _ in columns[:-1]], Text("failed", style="red"))
            continue
        table.add_row(arm.name, *[cell(arm) for _, cell, _ in columns])
    if comparison.noise_low is not None and comparison.noise_high is not None:
        middle = (comparison.noise_low * comparison.noise_high) ** 0.5
        cells = [
            _plus_minus(middle, comparison.noise_low, comparison.noise_high) if title == _RATIO else Text()
            for title, _, _ in columns
        ]
        table.add_row(Text("A/A", style="dim"), *cells)
    return table


Column = tuple[str, Callable[[ArmResult], Text], bool]


def _columns(rows: list[ArmResult]) -> list[Column]:
    def number(value: float | int | None, form: object = None) -> Text:
        if value is None:
            return Text("-", style="dim")
        return Text(us(value) if form is us else f"{value:,}")

    every: list[Column] = [
        ("isolated", lambda a: number(a.isolated_us, us), any(a.isolated_us is not None for a in rows)),
        ("host", lambda a: number(a.host_us, us), any(a.host_us is not None for a in rows)),
        ("step", _step, True),
        (_RATIO, _ratio, True),
        ("", _verdict, any(a.verdict for a in rows)),
        ("breaks", lambda a: number(a.breaks), any(a.breaks is not None for a in rows)),
        ("graphs", lambda a: number(a.graphs), any(a.graphs is not None for a in rows)),
        ("launches", lambda a: number(a.launches), any(a.launches is not None for a in rows)),
    ]
    return [c for c in every if c[2]]


def _step(arm: ArmResult) -> Text:
    if arm.step_us is None:
        return Text("-", style="dim")
    text = Text(us(arm.step_us))
    if arm.step_low is not None and arm.step_high is not None:
        half = (arm.step_high - arm.step_low) / 2
        scale = 1e3 if arm.step_us >= 1e3 else 1.0
        digits = 1 if arm.step_us / scale >= 10 or scale == 1.0 else 2
        text.append(f" ± {half / scale:.{digits}f}", style="dim")
    return text


def _ratio(arm: ArmResult) -> Text:
    if arm.ratio is None:
        return Text()
    return _plus_minus(arm.ratio, arm.ratio_low, arm.ratio_high)


def _plus_minus(middle: float, low: float | None, high: float | None) -> Text:
    text = Text(f"{middle:.3f}")
    if low is not None and high is not None and high - low > 1:
        # An interval as wide as this has no middle to speak of.
        return Text(f"{low:.2g} to {high:.2g}")
    if low is not None and high is not None:
        text.append(f" ± {(high - low) / 2:.3f}", style="dim")
    return text


def _verdict(arm: ArmResult) -> Text:
    return Text(arm.verdict or "", style=_STYLE.get(arm.verdict or "", ""))


def _facts(comparison: Comparison) -> Text:
    facts = []
    if comparison.smallest_effect is not None:
        facts.append(f"smallest effect seen here {comparison.smallest_effect:.2%}")
    if comparison.copy_bytes_per_second:
        rate = comparison.copy_bytes_per_second
        copy = f"{rate / 1e12:.2f} TB/s" if rate >= 1e12 else f"{rate / 1e9:.1f} GB/s"
        share = comparison.kernel_share_of_copy
        facts.append(f"copy {copy}" + (f", the kernel alone reaches {share:.0%} of it" if share else ""))
    if comparison.stopped_because:
        facts.append(f"stopped because {comparison.stopped_because}")
    return Text(" · ".join(facts), style="dim")


def ledger_table(ledger: Ledger, width: int) -> RenderableType:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column(f"ledger, {ledger.arm} against compiler", min_width=34)
    table.add_column("us a step", justify="right", no_wrap=True)
    table.add_column("", style="dim", overflow="fold")
    for term in ledger.terms:
        detail = f", {term.detail}" if term.detail and (width >= 100 or term.name == "unexplained") else ""
        table.add_row(_name(term), signed(term.us_per_step), f"{term.how}{detail}")
    table.add_row(Text("the step", style="bold"), Text(signed(ledger.total_us), style="bold"), "measured")
    return Group(table, Text(_bounds(ledger), style="dim"))


def _bounds(ledger: Ledger) -> str:
    facts = []
    if ledger.share_of_step is not None:
        facts.append(f"the op is {ledger.share_of_step:.1%} of the step")
    if ledger.amdahl_bound is not None:
        facts.append(f"by its isolated speed alone the step would be {ledger.amdahl_bound:.3f}x (Amdahl)")
    if ledger.unexplained_share is not None and not reliable(ledger):
        facts.append(f"{ledger.unexplained_share:.0%} of the step unexplained: too much for these terms to name causes")
    return " · ".join(facts)


def prediction_text(one: Prediction) -> str:
    beside = f", measured {us(one.measured_us)}" if one.measured_us is not None else ""
    error = f" ({one.error:+.1%})" if one.error is not None else ""
    return (
        f"From isolated times and the compiled graph alone the step with {one.arm} would be {us(one.predicted_us)}"
        f"{beside}{error}."
    )


def _name(term: LedgerTerm) -> str:
    counts = []
    if term.launches_per_step:
        counts.append(f"{term.launches_per_step:+d} launches")
    if term.bytes_per_step:
        counts.append(("+" if term.bytes_per_step > 0 else "") + data(term.bytes_per_step))
    return f"{term.name}{', ' if counts else ''}{', '.join(counts)}"


def signed(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:+,.0f}" if abs(value) >= 10 else f"{value:+,.1f}"


def comparison_html(comparison: Comparison) -> str:
    """An HTML fragment: the paragraph, the table, the intervals and the waterfall as pictures, the ledgers as tables.

    Everything that comes from a report is escaped. Pictures are inline SVG; text carries what they show.
    """
    from opgraft.diagnostics.report import figures

    parts = ['<section class="comparison">']
    if comparison.sentence:
        parts.append(f'<p class="verdict">{_text(comparison.sentence)}</p>')
    if comparison.arms:
        parts.append(_arms_html(comparison))
    parts.append(f'<p class="facts">{_text(_facts(comparison).plain)}</p>')
    if (picture := figures.intervals(comparison)) is not None:
        parts.append(
            _figure(picture, "Step time of every arm against the compiler, with 95 % intervals and the A/A run.")
        )
    for ledger in comparison.ledgers:
        if (picture := figures.waterfall(ledger)) is not None:
            parts.append(_figure(picture, f"What the difference between {ledger.arm} and the compiler consists of."))
        parts.append(_ledger_html(ledger))
    parts += [f"<p>{_text(prediction_text(one))}</p>" for one in comparison.predictions]
    if comparison.environment:
        listed = ", ".join(f"{key} {value}" for key, value in comparison.environment.items())
        parts.append(f'<p class="environment">Measured on: {_text(listed)}.</p>')
    parts.append("</section>")
    return "\n".join(parts)


def _text(value: str) -> str:
    return html.escape(value, quote=True)


def _figure(picture: str, caption: str) -> str:
    return f"<figure>{picture}<figcaption>{_text(caption)}</figcaption></figure>"


def _arms_html(comparison: Comparison) -> str:
    columns = _columns(list(comparison.arms))
    head = "".join(f'<th scope="col">{_text(title)}</th>' for title, _, _ in columns)
    rows = []
    for arm in comparison.arms:
        if arm.failed:
            cells = f'<td colspan="{len(columns)}">failed: {_text(arm.failed)}</td>'
        else:
            cells = "".join(f"<td>{_text(cell(arm).plain)}</td>" for _, cell, _ in columns)
        rows.append(f'<tr><th scope="row">{_text(arm.name)}</th>{cells}</tr>')
    if comparison.noise_low is not None and comparison.noise_high is not None:
        middle = math.sqrt(comparison.noise_low * comparison.noise_high)
        text = _plus_minus(middle, comparison.noise_low, comparison.noise_high).plain
        cells = "".join(f"<td>{_text(text) if title == _RATIO else ''}</td>" for title, _, _ in columns)
        rows.append(f'<tr class="noise"><th scope="row">A/A</th>{cells}</tr>')
    body = "".join(rows)
    return f'<table class="arms"><thead><tr><th scope="col">arm</th>{head}</tr></thead><tbody>{body}</tbody></table>'


def _ledger_html(ledger: Ledger) -> str:
    rows = "".join(
        f'<tr><th scope="row">{_text(_name(t))}</th><td>{_text(signed(t.us_per_step))}</td>'
        f"<td>{_text(t.how)}{_text(', ' + t.detail) if t.detail else ''}</td></tr>"
        for t in ledger.terms
    )
    step = _text(signed(ledger.total_us))
    total = f'<tr class="total"><th scope="row">the step</th><td>{step}</td><td>measured</td></tr>'
    head = '<tr><th scope="col">term</th><th scope="col">us a step</th><th scope="col">how it is known</th></tr>'
    bound = _bounds(ledger)
    note = f'<p class="facts">{_text(bound)}</p>' if bound else ""
    return (
        f'<table class="ledger"><caption>Ledger, {_text(ledger.arm)} against compiler</caption>'
        f"<thead>{head}</thead><tbody>{rows}{total}</tbody></table>{note}"
    )
