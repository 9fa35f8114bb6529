"""The doctor's table, op against check, for the terminal and for the HTML page."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from opgraft.diagnostics.model import CheckResult

MARK = {"pass": "pass", "fail": "FAIL", "not-applicable": "n/a", "not-run": "not run"}
# A reason that holds for more checks than this does not name them all.
MOST_NAMES = 10
# How the detail of a failed check begins that has no finding of its own.
PART = "part of a finding above: "
SHORT = {"pass": "✓", "fail": "✗", "not-applicable": "–", "not-run": "?"}
LEGEND = " · ".join(f"{SHORT[outcome]} {words}" for outcome, words in MARK.items())
# What rich puts between two columns.
GAP = 2
# With more ops than this the page has one row an op as well.
MOST_COLUMNS = 6
STYLE = {"pass": "green", "fail": "bold red", "not-applicable": "dim", "not-run": "yellow"}


def by_check(checks: Iterable[CheckResult]) -> tuple[list[str], list[str], dict[tuple[str, str], CheckResult]]:
    """Names of ops, names of checks, and the cells."""
    ops: list[str] = []
    names: list[str] = []
    cells: dict[tuple[str, str], CheckResult] = {}
    for result in checks:
        if result.op not in ops:
            ops.append(result.op)
        if result.check not in names:
            names.append(result.check)
        cells[result.op, result.check] = result
    return ops, names, cells


def print_checks(checks: Sequence[CheckResult], console: Console) -> None:
    """One row a check and one column an op, where that fits the width; else one row an op. With a single op a column
    says why."""
    if not checks:
        return
    ops, names, cells = by_check(checks)
    width = max(map(len, names)) + sum(GAP + max(len(op), len(MARK["not-run"])) for op in ops)
    if len(ops) > 1 and width > console.width:
        console.print(_ops_as_rows(ops, checks))
    else:
        console.print(_checks_as_rows(ops, names, cells))
    if len(ops) > 1:
        for reason, where in _reasons(checks).items():
            console.print(Text(f"{where}: {reason}", style="dim"))


def _checks_as_rows(ops: list[str], names: list[str], cells: dict[tuple[str, str], CheckResult]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("check")
    for op in ops:
        table.add_column(op, overflow="fold")
    if len(ops) == 1:
        table.add_column("", overflow="fold")
    for name in names:
        row: list[Text] = [Text(name)]
        for op in ops:
            cell = cells.get((op, name))
            row.append(Text(MARK[cell.outcome], style=STYLE[cell.outcome]) if cell else Text(""))
        if len(ops) == 1:
            cell = cells[ops[0], name]
            told = cell.outcome == "fail" and not cell.detail.startswith(PART)
            row.append(Text("" if told else cell.detail, style="dim"))
        table.add_row(*row)
    return table


def _ops_as_rows(ops: list[str], checks: Sequence[CheckResult]) -> Table:
    """How many checks had which outcome, and the names of those that failed."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("op", overflow="fold")
    for outcome in ("pass", "not-applicable", "not-run"):
        table.add_column(MARK[outcome], justify="right")
    table.add_column("failed", overflow="fold")
    for op in ops:
        mine = [result for result in checks if result.op == op]
        counts = {outcome: sum(result.outcome == outcome for result in mine) for outcome in MARK}
        failed = ", ".join(result.check for result in mine if result.outcome == "fail")
        row = [Text(str(counts[outcome]), style=STYLE[outcome]) for outcome in ("pass", "not-applicable", "not-run")]
        table.add_row(Text(op), *row, Text(failed, style=STYLE["fail"]))
    return table


def _reasons(checks: Iterable[CheckResult]) -> dict[str, str]:
    """Why a cell is empty, each reason once with the checks and the number of ops that it holds for."""
    places: dict[str, dict[str, int]] = {}
    for result in checks:
        if result.detail and (result.outcome in ("not-applicable", "not-run") or result.detail.startswith(PART)):
            names = places.setdefault(result.detail, {})
            names[result.check] = names.get(result.check, 0) + 1
    return {reason: _named(names) for reason, names in places.items()}


def _named(counts: dict[str, int]) -> str:
    """Checks with the number of ops of each; of many the first and the last."""
    words = [f"{name} ({count} ops)" if count > 1 else name for name, count in counts.items()]
    return ", ".join(words) if len(words) <= MOST_NAMES else f"{len(words)} checks from {words[0]} to {words[-1]}"


def checks_html(checks: Sequence[CheckResult]) -> str:
    """The table as an HTML fragment; every text in it is escaped."""
    if not checks:
        return ""
    ops, names, cells = by_check(checks)
    rows_are_ops = len(ops) > MOST_COLUMNS
    across, down = (names, ops) if rows_are_ops else (ops, names)
    head = "".join(f"<th scope='col'><span>{html.escape(name)}</span></th>" for name in across)
    rows = []
    for name in down:
        row = []
        for other in across:
            cell = cells.get((name, other) if rows_are_ops else (other, name))
            if cell is None:
                row.append("<td></td>")
            else:
                title = html.escape(f"{cell.check}: {cell.detail}" if cell.detail else cell.check, quote=True)
                mark = SHORT[cell.outcome] if rows_are_ops else MARK[cell.outcome]
                row.append(f"<td class='check-{cell.outcome}' title='{title}'>{mark}</td>")
        rows.append(f"<tr><th scope='row'>{html.escape(name)}</th>{''.join(row)}</tr>")
    kind = "checks tall" if rows_are_ops else "checks"
    legend = f"<p class='dim'>{LEGEND}</p>" if rows_are_ops else ""
    body = f"<thead><tr><th></th>{head}</tr></thead><tbody>{''.join(rows)}</tbody>"
    return f"{legend}<table class='{kind}'>{body}</table>"
