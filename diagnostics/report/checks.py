"""The doctor's table, op against check, for the terminal and for the HTML page."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from opgraft.diagnostics.model import CheckResult

MARK = {"pass": "pass", "fail": "FAIL", "not-applicable": "n/a", "not-run": "not run"}
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
    """One row a check, one column an op; with a single op a column says why."""
    if not checks:
        return
    ops, names, cells = by_check(checks)
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
            row.append(Text(cell.detail if cell.outcome != "fail" else "", style="dim"))
        table.add_row(*row)
    console.print(table)
    if len(ops) > 1:
        for reason, where in _reasons(checks).items():
            console.print(Text(f"{where}: {reason}", style="dim"))


def _reasons(checks: Iterable[CheckResult]) -> dict[str, str]:
    """Why a cell is empty, each reason once with the checks and the number of ops that it holds for."""
    places: dict[str, dict[str, int]] = {}
    for result in checks:
        if result.detail and result.outcome in ("not-applicable", "not-run"):
            names = places.setdefault(result.detail, {})
            names[result.check] = names.get(result.check, 0) + 1
    return {
        reason: ", ".join(f"{name} ({count} ops)" if count > 1 else name for name, count in names.items())
        for reason, names in places.items()
    }


def checks_html(checks: Sequence[CheckResult]) -> str:
    """The table as an HTML fragment; every text in it is escaped."""
    if not checks:
        return ""
    ops, names, cells = by_check(checks)
    head = "".join(f"<th scope='col'>{html.escape(op)}</th>" for op in ops)
    rows = []
    for name in names:
        row = []
        for op in ops:
            cell = cells.get((op, name))
            if cell is None:
                row.append("<td></td>")
            else:
                title = html.escape(cell.detail, quote=True)
                row.append(f"<td class='check-{cell.outcome}' title='{title}'>{MARK[cell.outcome]}</td>")
        rows.append(f"<tr><th scope='row'>{html.escape(name)}</th>{''.join(row)}</tr>")
    return f"<table class='checks'><thead><tr><th></th>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
