"""A comparison for people: the table of arms and the ledger in the terminal, and the same with pictures in HTML."""

from __future__ import annotations

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from opgraft.diagnostics.measure.prose import data, us
from opgraft.diagnostics.model import ArmResult, Comparison, Ledger, LedgerTerm

_RATIO = "against compiler"
_STYLE = {"FASTER": "bold green", "SLOWER": "bold red", "EQUIVALENT": "bold", "UNRESOLVED": "yellow"}


def print_comparison(comparison: Comparison, console: Console) -> None:
    """Prints the table, the noise floor, the ledgers and the paragraph."""
    for part in renderables(comparison, console.width):
        console.print(part)


def renderables(comparison: Comparison, width: int) -> list[RenderableType]:
    parts: list[RenderableType] = [arm_table(comparison, width)] if comparison.arms else []
    parts.append(_facts(comparison))
    for ledger in comparison.ledgers:
        parts += [Text(), ledger_table(ledger, width)]
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


def _columns(rows: list[ArmResult]) -> list[tuple[str, object, bool]]:
    def number(value: float | int | None, form: object = None) -> Text:
        if value is None:
            return Text("-", style="dim")
        return Text(us(value) if form is us else f"{value:,}")

    every = [
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
    facts = []
    if ledger.share_of_step is not None:
        facts.append(f"the op is {ledger.share_of_step:.1%} of the step")
    if ledger.amdahl_bound is not None:
        facts.append(f"by its isolated speed alone it would be {ledger.amdahl_bound:.3f}x (Amdahl)")
    return Group(table, Text(" · ".join(facts), style="dim"))


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
