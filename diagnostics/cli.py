"""The command line: one thin entry a command, each in its own module under ``commands/``."""

from __future__ import annotations

import typer

from opgraft.diagnostics.commands import register

app = typer.Typer(
    name="opgraft",
    help="Custom C++/CUDA kernels under torch.compile: what breaks the graph, what it costs, is the kernel worth it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
register(app)


def main() -> None:
    app()


if __name__ == "__main__":
    main()
