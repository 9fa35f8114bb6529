"""``opgraft store``: the decisions that the compiler's choice of kernels keeps on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Optional

import typer

store_app = typer.Typer(no_args_is_help=True, help="Show, prune and export the decisions between kernel and compiler.")

Where = Annotated[
    Optional[Path],  # noqa: UP045 - typer reads the annotation at run time on 3.10
    typer.Option("--store", metavar="PATH", help="A folder or a file; $OPGRAFT_STORE or the cache folder by default."),
]
Op = Annotated[Optional[str], typer.Option("--op", metavar="ns::op", help="This op's decisions alone.")]  # noqa: UP045


def register(app: typer.Typer) -> None:
    app.add_typer(store_app, name="store")


@store_app.command()
def show(store: Where = None, op: Op = None) -> None:
    """Every decision: op, surroundings, inputs, choice and reason."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console()
    for path, entries, problem in _files(store):
        console.print(
            f"{escape(str(path))}: {escape(problem) if problem else f'{len(entries)} decisions'}", soft_wrap=True
        )
        table = Table("op", "surroundings", "inputs", "choice", "why", "measured on")
        for _, entry in sorted(entries.items(), key=lambda item: str(item[1].get("op"))):
            if _is_about(entry, op):
                inputs = ", ".join(map(str, entry.get("inputs") or ()))
                cells = (entry.get("op"), entry.get("surroundings"), inputs, entry.get("choice"), entry.get("why"))
                table.add_row(*(escape(str(c)) for c in (*cells, entry.get("measured_on", ""))))
        if table.row_count:
            console.print(table)


@store_app.command()
def prune(
    store: Where = None,
    op: Op = None,
    stale: Annotated[
        bool, typer.Option("--stale", help="Decisions for another build of an op, or an op not known.")
    ] = False,
    everything: Annotated[bool, typer.Option("--all", help="All decisions.")] = False,
) -> None:
    """Remove decisions: those of an op, stale ones, or all."""
    from opgraft.compile.store import merge

    if not (op or stale or everything):
        raise typer.BadParameter("say what to remove: --op ns::op, --stale or --all")
    for path, entries, problem in _files(store):
        gone = frozenset(
            k for k, e in entries.items() if everything or (op and _is_about(e, op)) or (stale and _stale(e))
        )
        if gone and not problem:
            merge(path, {}, drop=gone)
        typer.echo(f"{path}: {problem or f'{len(gone)} of {len(entries)} decisions removed'}")


@store_app.command()
def export(
    target: Annotated[Path, typer.Argument(metavar="FILE.json", help="The file to write, for example beside a model.")],
    store: Where = None,
    op: Op = None,
) -> None:
    """Copy decisions into one file, to be named as store= or checked in beside a model."""
    from opgraft.compile.store import merge

    if target.suffix != ".json":
        raise typer.BadParameter(f"{target} must end in .json: that is how a store is known to be one file")
    chosen: dict[str, Any] = {}
    for path, entries, _ in _files(store):
        if path.resolve() != target.resolve():
            chosen.update({k: e for k, e in entries.items() if _is_about(e, op)})
    try:
        merge(target, chosen)
    except OSError as error:
        raise typer.BadParameter(str(error)) from error
    typer.echo(f"{target}: {len(chosen)} decisions")


def _files(location: Path | None) -> list[tuple[Path, dict[str, dict[str, Any]], str]]:
    """The files of a store, with their decisions and what is wrong with them."""
    from opgraft.compile.store import default_folder, read

    place = location or default_folder()
    paths = [place] if place.suffix == ".json" else sorted(place.glob("*.json")) if place.is_dir() else []
    if not paths:
        typer.echo(f"no decisions in {place}")
    return [(path, *read(path)) for path in paths]


def _is_about(entry: dict[str, Any], op: str | None) -> bool:
    """True for an entry of an op, or of a stretch of a model with sites of it; True for all where no op is named."""
    return op is None or op in str(entry.get("op")).split(", ")


def _stale(entry: dict[str, Any]) -> bool:
    from opgraft import registry
    from opgraft.compile import identity

    specs = [registry.find(name) for name in str(entry.get("op")).split(", ")]
    builds = [identity.of_op(spec) for spec in specs if spec is not None]
    return len(builds) != len(specs) or ", ".join(builds) != entry.get("build")
