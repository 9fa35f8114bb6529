"""``opgraft doctor``: is this op a first-class citizen?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def doctor(
    ops: Annotated[list[str], typer.Argument(metavar="ns::op ...", help="The ops to examine.")],
    imports: Annotated[
        list[str] | None,
        typer.Option("--import", metavar="MODULE", help="Module, .py file or .so that registers them."),
    ] = None,
    json: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the report as JSON.")] = None,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Write the report as an HTML page.")
    ] = None,
    thorough: Annotated[bool, typer.Option("--thorough", help="More inputs, larger ones, and more time.")] = False,
    sanitizer: Annotated[
        bool, typer.Option("--sanitizer", help="Run under compute-sanitizer, where it is installed.")
    ] = False,
    device: Annotated[str, typer.Option(help="Device of the inputs.")] = "cpu",
    seconds: Annotated[float | None, typer.Option(help="Time for each op; 30 by default, 300 with --thorough.")] = None,
) -> None:
    """Puts ops through every check and prints a table of op against check. Exit code 1 where one has an error."""
    from rich.console import Console

    from opgraft.diagnostics.conform.command import run

    raise typer.Exit(
        run(
            tuple(ops),
            imports=tuple(imports or ()),
            json=json,
            html=html,
            thorough=thorough,
            sanitizer=sanitizer,
            device=device,
            seconds=seconds,
            console=Console(),
        )
    )


def register(app: typer.Typer) -> None:
    app.command(name="doctor", no_args_is_help=True)(doctor)
