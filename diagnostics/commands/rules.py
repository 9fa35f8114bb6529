"""``opgraft rules``: what a finding means, why it matters, an example and the remedy."""

from __future__ import annotations

import typer


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command("rules")(rules)


def rules(code: str | None = typer.Argument(None, help="a code as OG101, or a kind as opaque-call")) -> None:
    """List every kind of finding, or print the page of one."""
    from rich.console import Console
    from rich.markdown import Markdown
    from rich.table import Table

    from opgraft.diagnostics.kinds import KINDS
    from opgraft.diagnostics.report import pages

    console = Console()
    if code is not None:
        page = pages.page(code)
        if page is None:
            print(f"opgraft rules: there is no page {code!r}; `opgraft rules` lists them")
            raise typer.Exit(2)
        console.print(Markdown(pages.markdown(page)))
        return
    table = Table(box=None, pad_edge=False)
    for name in ("code", "kind", "what it is"):
        table.add_column(name, no_wrap=name != "what it is")
    for kind in KINDS.values():
        found = pages.pages().get(kind.code)
        title = found.title.rstrip(".").partition(": ")[2] or found.title.rstrip(".") if found else ""
        table.add_row(kind.code, kind.name, title)
    console.print(table)
