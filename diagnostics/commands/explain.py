"""``opgraft explain``: runs a program unchanged and reports every graph break, its root, its owner and its remedy."""

from __future__ import annotations

from pathlib import Path

import typer

_SETTINGS = {"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False}


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command("explain", context_settings=_SETTINGS)(explain)


def explain(
    context: typer.Context,
    target: str | None = typer.Argument(None, metavar="SCRIPT", help="a script, or FILE.py:function; with -m a module"),
    module: bool = typer.Option(False, "-m", help="run the module of this name, as python -m does"),
    json: Path | None = typer.Option(None, "--json", metavar="FILE", help="write the report as JSON"),
    html: Path | None = typer.Option(None, "--html", metavar="FILE", help="write the report as one HTML page"),
    sarif: Path | None = typer.Option(None, "--sarif", metavar="FILE", help="write the findings as SARIF 2.1.0"),
    markdown: Path | None = typer.Option(None, "--markdown", metavar="FILE", help="write the report as Markdown"),
    events: Path | None = typer.Option(None, "--events", metavar="FILE", help="keep the stream of events"),
    check_ops: bool = typer.Option(
        True, "--check-ops/--no-check-ops", help="put custom ops that the run meets to the test"
    ),
    verbose: bool = typer.Option(False, "--verbose", "-v", help="stacks, torch's own messages and evidence"),
    notes: bool = typer.Option(False, "--notes", help="show notes as well"),
    quiet: bool = typer.Option(False, "--quiet", "-q", help="print no report"),
    sites: bool = typer.Option(False, "--sites", help="list where an op could serve, chosen or not, and why"),
) -> None:
    """Run SCRIPT as python would, and report what its compiled models break on.

    All that stands after SCRIPT, options too, goes to it; its exit code is the command's.
    """
    from opgraft.diagnostics.collect import explaining, site_list

    outputs = explaining.Outputs(json=json, html=html, sarif=sarif, markdown=markdown, events=events)
    shown = explaining.Shown(verbose=verbose, notes=notes, quiet=quiet)
    with site_list.listed(sites) as show_sites:
        code = explaining.explain_program(
            target, list(context.args), outputs, shown, module=module, check_ops=check_ops
        )
        show_sites()
    raise typer.Exit(code)
