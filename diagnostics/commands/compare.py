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
    train: Annotated[bool, typer.Option("--train", help="A step is forward, backward and optimiser.")] = False,
    mode: Annotated[Optional[str], typer.Option(help="torch.compile's mode.")] = None,  # noqa: UP045
    arms: Annotated[Optional[str], typer.Option(help="Arms beside compiler, with commas: eager,op,raw.")] = None,  # noqa: UP045
    device: Annotated[Optional[str], typer.Option(help="Move the model and its inputs there.")] = None,  # noqa: UP045
) -> None:
    """Time a model with its custom ops against the same model with the compiler's own code in their places."""
    from opgraft.diagnostics.measure.command import run

    raise typer.Exit(
        run(
            target,
            without=tuple(without or ()),
            json=json,
            html=html,
            seconds=seconds,
            train=train,
            mode=mode,
            arms=tuple(a.strip() for a in arms.split(",")) if arms else None,
            device=device,
        )
    )
