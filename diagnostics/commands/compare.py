"""``opgraft compare``: is a kernel worth it in a compiled model, from a file that builds the model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer


def register(app: typer.Typer) -> None:
    app.command("compare")(compare)


def compare(
    target: Annotated[str, typer.Argument(metavar="FILE.py:build", help="build() returns (model, inputs).")],
    without: Annotated[
        Optional[list[str]],  # noqa: UP045 - typer reads the annotation at run time on 3.10
        typer.Option(
            "--without", metavar="ns::op", help="An op to compare; every described op of the model by default."
        ),
    ] = None,
    json: Annotated[Optional[Path], typer.Option("--json", help="Write the report as JSON.")] = None,  # noqa: UP045
    html: Annotated[Optional[Path], typer.Option("--html", help="Write the report as one HTML page.")] = None,  # noqa: UP045
    seconds: Annotated[float, typer.Option(help="Time for timing, beside compiling.", min=1.0)] = 60.0,
    processes: Annotated[int, typer.Option(help="Fresh processes at most.", min=1)] = 5,
    train: Annotated[bool, typer.Option("--train", help="A step is forward, backward and optimiser.")] = False,
    mode: Annotated[Optional[str], typer.Option(help="torch.compile's mode, such as reduce-overhead.")] = None,  # noqa: UP045
    dynamic: Annotated[bool, typer.Option("--dynamic", help="Compile with dynamic shapes.")] = False,
    arms: Annotated[Optional[str], typer.Option(help="Arms beside compiler, with commas: eager,op,raw.")] = None,  # noqa: UP045
    raw: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(metavar="NAME", help="A function of the file that returns the raw form's Swap; raw by default."),
    ] = None,
    device: Annotated[Optional[str], typer.Option(help="Move the model and its inputs there.")] = None,  # noqa: UP045
    predict: Annotated[
        bool, typer.Option("--predict", help="Say what isolated times alone would have foretold.")
    ] = False,
    ledger: Annotated[bool, typer.Option("--ledger/--no-ledger", help="Split the difference into terms.")] = True,
    notes: Annotated[bool, typer.Option("--notes", help="Show notes too.")] = False,
    limit: Annotated[Optional[float], typer.Option(help="Seconds that one process may take.")] = None,  # noqa: UP045
) -> None:
    """Time a model with its custom ops against the same model with the compiler's own code in their places."""
    from opgraft.diagnostics.measure.command import run

    options: dict[str, object] = {}
    if mode:
        options["mode"] = mode
    if dynamic:
        options["dynamic"] = True
    raise typer.Exit(
        run(
            target,
            json=json,
            html=html,
            notes=notes,
            ops=tuple(without or ()),
            arms=tuple(a.strip() for a in arms.split(",")) if arms else None,
            raw=raw,
            train=train,
            seconds=seconds,
            processes=processes,
            compile_options=options,
            device=device,
            predict=predict,
            ledger=ledger,
            limit=limit,
        )
    )
