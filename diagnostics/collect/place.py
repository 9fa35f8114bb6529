"""Places in source: frames as plain data with their text, and which of them the reader can change."""

from __future__ import annotations

import linecache
import os
import re
import sysconfig
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from opgraft.diagnostics.model import Location

_RESUME = re.compile(r"^torch_dynamo_resume_in_(.+)_at_\d+$")
_FRAME = re.compile(r'File "(?P<path>[^"]+)", line (?P<line>\d+), in (?P<name>\S+)')
_SITE = ("site-packages", "dist-packages")


def function_name(name: str) -> str:
    """The name in the source: ``torch_dynamo_resume_in_forward_at_12`` is a part of ``forward``."""
    while found := _RESUME.match(name):
        name = found[1]
    return name


def place(
    path: str,
    line: int | None,
    function: str = "",
    end_line: int | None = None,
    column: int | None = None,
    end_column: int | None = None,
) -> Location:
    """A location with the text of its line. Columns come in bytes of UTF-8, as bytecode has them, and leave in
    characters."""
    line = line or 0
    text = linecache.getline(path, line)
    if column is not None and text and not text.isascii():
        raw = text.encode()
        column = len(raw[:column].decode(errors="replace"))
        if end_column is not None and end_line in (None, line):
            end_column = len(raw[:end_column].decode(errors="replace"))
    return Location(
        path=path,
        line=line,
        function=function_name(function),
        text=text.rstrip("\n")[:400],
        end_line=end_line,
        column=column,
        end_column=end_column,
    )


@lru_cache(maxsize=1)
def own_prefixes() -> tuple[str, ...]:
    """Folders whose code the reader of a report cannot change: torch, the standard library, this package."""
    folders = {str(Path(__file__).resolve().parents[1]), sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")}
    folders.add(os.path.dirname(os.__file__))
    for name in ("torch", "functorch", "torchgen", "triton"):
        spec = _origin(name)
        if spec:
            folders.add(spec)
    return tuple(sorted(folder for folder in folders if folder))


def _origin(name: str) -> str:
    import importlib.util
    import sys

    module = sys.modules.get(name)
    if module is not None and getattr(module, "__file__", None):
        return os.path.dirname(str(module.__file__))
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return ""
    return os.path.dirname(spec.origin) if spec is not None and spec.origin else ""


def changeable(path: str, prefixes: Sequence[str]) -> bool:
    """True where ``path`` is a file of the reader's, or of a package that is neither torch nor the standard library."""
    if not path or path.startswith("<") or "<eval_with_key>" in path:
        return False
    for prefix in prefixes:
        if path.startswith(prefix + "/"):
            rest = path[len(prefix) + 1 :]
            if prefix.endswith("/torch") or not any(part in _SITE for part in rest.split("/")):
                return False
    return True


def innermost(stack: Sequence[Location], prefixes: Sequence[str]) -> Location | None:
    """The innermost frame that the reader can change; ``stack`` is outermost first."""
    return next((frame for frame in reversed(stack) if changeable(frame.path, prefixes)), None)


def frames_of(text: str) -> tuple[Location, ...]:
    """The frames that a text of torch's quotes, outermost first."""
    return tuple(place(found["path"], int(found["line"]), found["name"]) for found in _FRAME.finditer(text))


def from_summaries(frames: Iterable[Any]) -> tuple[Location, ...]:
    """FrameSummary objects, outermost first, as locations."""
    return tuple(
        place(
            frame.filename,
            frame.lineno,
            frame.name,
            getattr(frame, "end_lineno", None),
            getattr(frame, "colno", None),
            getattr(frame, "end_colno", None),
        )
        for frame in frames
    )
