"""The commands of ``opgraft``. Every module here defines one function and ``register(app)``."""

from __future__ import annotations

import importlib
import pkgutil

import typer


def register(app: typer.Typer) -> None:
    """Adds every command of this package to ``app``, in alphabetical order."""
    for module in sorted(pkgutil.iter_modules(__path__), key=lambda found: found.name):
        importlib.import_module(f"{__name__}.{module.name}").register(app)
