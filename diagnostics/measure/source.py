"""``FILE.py:function`` and ``package.module:function``: where a model comes from."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def split(target: str) -> tuple[str, str]:
    """File or module, and the function; ``build`` where none is named."""
    place, separator, name = target.rpartition(":")
    if not separator or (not place):
        return target, "build"
    return place, name or "build"


def load_build(target: str) -> Callable[[], Any]:
    """Imports the file or module and returns its function.

    The file's folder comes first on ``sys.path``, as when Python runs the file.

    Raises:
        FileNotFoundError: there is no such file or module.
        LookupError: it has no such function.
    """
    place, name = split(target)
    if place.endswith(".py"):
        path = Path(place).resolve()
        if not path.is_file():
            raise FileNotFoundError(
                f"there is no file {place}: give FILE.py:build, where build() returns (model, inputs)"
            )
        if str(path.parent) not in sys.path:
            sys.path.insert(0, str(path.parent))
        spec = importlib.util.spec_from_file_location(path.stem, path)
        if spec is None or spec.loader is None:
            raise FileNotFoundError(f"{place} cannot be imported as a Python file")
        module = importlib.util.module_from_spec(spec)
        sys.modules[path.stem] = module
        spec.loader.exec_module(module)
    else:
        try:
            module = importlib.import_module(place)
        except ModuleNotFoundError as error:
            if error.name is not None and not place.startswith(error.name):
                raise
            raise FileNotFoundError(
                f"there is no module {place}: give FILE.py:build or package.module:build"
            ) from error
    found = getattr(module, name, None)
    if not callable(found):
        functions = sorted(
            name
            for name, value in vars(module).items()
            if inspect.isfunction(value) and value.__module__ == module.__name__ and not name.startswith("_")
        )
        have = f"; it has {', '.join(functions[:8])}" if functions else ""
        raise LookupError(f"{place} has no function {name}{have}")
    return found  # type: ignore[no-any-return]
