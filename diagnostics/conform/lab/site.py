"""Where in the reader's code a call comes from, also while the compiler traces it or runs what it made of it.

Imports nothing of torch: it works in a program that has not imported it yet.
"""

from __future__ import annotations

import re
import sys
from types import CodeType, FrameType, ModuleType
from typing import Any

from opgraft.diagnostics.collect.place import changeable, function_name, own_prefixes, place
from opgraft.diagnostics.model import Location

# Frames in which somebody else's call passes through: what lies further out is not where the op is written.
TRACING = ("/torch/_dynamo/", "/torch/_functorch/", "/torch/fx/", "/torch/_inductor/", "/torch/export/")
GENERATED = ("<eval_with_key>", "torchinductor", "torch_compile_debug")
_FRAME = re.compile(r'File "(?P<path>[^"]+)", line (?P<line>\d+), in (?P<function>.+)')
_prefixes: list[tuple[str, ...]] = []


def prefixes() -> tuple[str, ...]:
    if not _prefixes:
        _prefixes.append(own_prefixes())
    return _prefixes[0]


def walk(frame: FrameType | None) -> tuple[Location | None, str]:
    """The innermost frame of the reader's, and how it was reached: ``eager``, ``traced`` or ``compiled``.

    The location is None where torch's tracer or generated code lies between.
    """
    known = prefixes()
    while frame is not None:
        path = frame.f_code.co_filename
        if any(word in path for word in GENERATED):
            return None, "compiled"
        if any(part in path for part in TRACING):
            return None, "traced"
        if changeable(path, known):
            return location(frame), "eager"
        frame = frame.f_back
    return None, "eager"


def location(frame: FrameType) -> Location:
    return place(frame.f_code.co_filename, frame.f_lineno, function_name(frame.f_code.co_name))


def traced_location() -> Location | None:
    """Where the statement stands that is being traced in this thread, as far as torch tells."""
    guards: Any = sys.modules.get("torch._guards")
    try:
        stack = guards.TracingContext.extract_stack() if guards is not None else []
    except Exception:
        stack = []
    for summary in reversed(list(stack)):
        if changeable(summary.filename, prefixes()):
            return place(summary.filename, summary.lineno, summary.name)
    traceback: Any = sys.modules.get("torch.fx.traceback")
    try:
        meta = traceback.get_current_meta() if traceback is not None else {}
    except Exception:
        meta = {}
    return from_text(str(meta.get("stack_trace") or ""))


def from_text(stack: str) -> Location | None:
    """The innermost frame of the reader's in a stack trace that is text."""
    for found in reversed(list(_FRAME.finditer(stack))):
        if changeable(found["path"], prefixes()):
            return place(found["path"], int(found["line"]), found["function"].strip())
    return None


def codes_of(module: ModuleType) -> list[CodeType]:
    """Every code object that a module defines, the nested ones too."""
    found: list[CodeType] = []

    def add(code: CodeType) -> None:
        found.append(code)
        for constant in code.co_consts:
            if isinstance(constant, CodeType):
                add(constant)

    for value in vars(module).values():
        if getattr(value, "__module__", module.__name__) != module.__name__:
            continue
        members = vars(value).values() if isinstance(value, type) else (value,)
        for member in members:
            inner = getattr(member, "fget", None) or getattr(member, "__func__", member)
            code = getattr(inner, "__code__", None)
            if isinstance(code, CodeType):
                add(code)
    return found
