"""``opgraft doctor``: is this op a first-class citizen?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def doctor(
    ops: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="ns::op ...",
            help="The ops to examine, or patterns such as 'mylib::*'; without any, what the imports register.",
        ),
    ] = None,
    imports: Annotated[
        list[str] | None,
        typer.Option("--import", metavar="MODULE", help="Module, .py file or .so that registers them."),
    ] = None,
    json: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the report as JSON.")] = None,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Write the report as an HTML page.")
    ] = None,
    sarif: Annotated[
        Path | None, typer.Option("--sarif", metavar="FILE", help="Write the findings as SARIF 2.1.0.")
    ] = None,
    markdown: Annotated[
        Path | None, typer.Option("--markdown", metavar="FILE", help="Write the report as Markdown.")
    ] = None,
    thorough: Annotated[bool, typer.Option("--thorough", help="More inputs, larger ones, and more time.")] = False,
    sanitizer: Annotated[
        bool, typer.Option("--sanitizer", help="Run under compute-sanitizer, where it is installed.")
    ] = False,
    device: Annotated[str, typer.Option(help="Device of the inputs.")] = "cpu",
    seconds: Annotated[float | None, typer.Option(help="Time for each op; 30 by default, 300 with --thorough.")] = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Every remedy and all evidence.")] = False,
    notes: Annotated[bool, typer.Option("--notes", help="Show notes as well.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print no report.")] = False,
) -> None:
    """Puts ops through every check and prints a table of op against check. Exit code 1 where one has an error.

    Examples:

    opgraft doctor --import mylib mylib::scale

    opgraft doctor --import build/libmylib.so --html doctor.html

    opgraft doctor --import mylib --device cuda --sanitizer 'mylib::*_backward'
    """
    from rich.console import Console

    from opgraft.diagnostics.collect.explaining import Outputs, Shown
    from opgraft.diagnostics.conform.command import run

    raise typer.Exit(
        run(
            tuple(ops or ()),
            imports=tuple(imports or ()),
            outputs=Outputs(json=json, html=html, sarif=sarif, markdown=markdown),
            shown=Shown(verbose=verbose, notes=notes, quiet=quiet),
            thorough=thorough,
            sanitizer=sanitizer,
            device=device,
            seconds=seconds,
            console=Console(),
            errors=Console(stderr=True),
        )
    )


def register(app: typer.Typer) -> None:
    app.command(name="doctor", no_args_is_help=True)(doctor)
