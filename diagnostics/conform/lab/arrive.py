"""How an op comes into a process: the modules and libraries that register it, as lines of a script and as names."""

from __future__ import annotations

import importlib.util
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

import torch

from opgraft.diagnostics import _compat
from opgraft.diagnostics.conform.lab.facts import OpFacts
from opgraft.diagnostics.conform.lab.tap import TORCH_NAMESPACES


def _importable(name: str, torchs: bool = False) -> bool:
    """Can a fresh process import this module? One of torch's own is none that registers an op of another's."""
    if not name or name in ("__main__", "__mp_main__") or (name.startswith("torch.") and not torchs):
        return False
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError, AttributeError):
        return False


def _file(module: ModuleType | None) -> str:
    path = getattr(module, "__file__", None)
    return path if isinstance(path, str) else ""


@cache
def _mentions(library: str, words: tuple[bytes, ...]) -> bool:
    try:
        content = Path(library).read_bytes()
    except OSError:
        return False
    return all(word in content for word in words)


def registrars(facts: OpFacts, given: tuple[str, ...] = ()) -> tuple[str, ...]:
    """What to import or load so that the op is there: what was given, else what its registration shows; ``()`` where
    that is the script itself or not known."""
    if given:
        return given
    spec = facts.spec
    torchs = facts.namespace in TORCH_NAMESPACES
    modules = [getattr(spec.reference, "__module__", "")] if spec is not None else []
    modules.append(getattr(_compat.python_kernel(facts.op), "__module__", ""))
    # A Library object of Python's leaves the file that made it.
    modules += [name for name, module in list(sys.modules.items()) if _file(module) == facts.location.path]
    for module in modules:
        if _importable(module, torchs):
            return (module,)
        path = _file(sys.modules.get(module))
        if module not in ("__main__", "__mp_main__", "") and path.endswith(".py"):
            return (path,)
    base = facts.name.partition("::")[2].partition(".")[0]
    words = (facts.namespace.encode(), base.encode())
    libraries = sorted(str(path) for path in getattr(torch.ops, "loaded_libraries", ()))
    found = tuple(library for library in libraries if _mentions(library, words))
    return found or (("torch",) if torchs else ())


def place_of(path: str) -> tuple[str, str]:
    """The folder to put on ``sys.path`` and the module's name, for a Python file; a package's for its ``__init__``."""
    file = Path(path).resolve()
    if file.name == "__init__.py":
        return str(file.parent.parent), file.parent.name
    return str(file.parent), file.stem


def lines(names: tuple[str, ...]) -> tuple[str, ...]:
    """The statements of a script that do it."""
    found: list[str] = []
    for name in names:
        if name.endswith(".so"):
            found.append(f"torch.ops.load_library({name!r})")
        elif name.endswith(".py"):
            folder, stem = place_of(name)
            found += ["import sys", f"sys.path.insert(0, {folder!r})", f"import {stem}"]
        else:
            found.append(f"import {name}")
    return tuple(found)
