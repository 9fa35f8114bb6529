"""H2: every message of the tracer as data, with the user's stack and what was being called at that moment.

``torch._dynamo.exc.unimplemented`` looks ``format_graph_break_message`` up in its module on every call, so wrapping
that name sees each message with its four fields apart. The wrapper runs inside the tracer: the tracer's own frames
are on the Python stack, and hold the bytecode positions and the objects that the text of the message has lost."""

from __future__ import annotations

import sys
import traceback
from types import FrameType
from typing import Any

from opgraft.diagnostics import _compat
from opgraft.diagnostics.collect.callee import describe
from opgraft.diagnostics.collect.events import Called, Message
from opgraft.diagnostics.collect.guards import only_raises
from opgraft.diagnostics.collect.place import changeable, from_summaries, own_prefixes, place
from opgraft.diagnostics.model import Location

_DEEPEST = 400
_CALLS = ("call_function", "call_method", "call_hasattr", "var_getattr")


def read_message(number: int, gb_type: str, context: str, explanation: str, hints: Any, frame: FrameType) -> Message:
    """A :class:`Message` from the fields and from the stack above ``frame``; what cannot be read stays empty."""
    translator, calls = _climb(frame)
    stack: tuple[Location, ...] = ()
    instruction = ""
    phase, function_class = "", ""
    if translator is not None:
        stack = translated_stack(translator)
        instruction = str(getattr(getattr(translator, "current_instruction", None), "opname", ""))
    if not stack:
        stack = from_summaries(_compat.user_stack())
    for _, variable, _, _ in calls:
        if type(variable).__name__ == "AutogradFunctionVariable":
            function_class = getattr(getattr(variable, "fn_cls", None), "__qualname__", "")
    if function_class:
        phase = _phase(frame)
    identity, attempt = _compat.trace_id()
    return Message(
        id=identity,
        attempt=attempt,
        number=number,
        gb_type=str(gb_type),
        context=str(context)[:2000],
        explanation=str(explanation)[:2000],
        hints=tuple(str(hint)[:1000] for hint in hints or ()),
        stack=stack,
        instruction=instruction,
        called=_called(calls),
        phase=phase,
        function_class=function_class,
        inner=_inner_frames(),
        raises="JUMP" in instruction and bool(stack) and only_raises(stack[-1].path, stack[-1].line),
    )


def _inner_frames() -> tuple[Location, ...]:
    """What ran in Python below the tracer when the exception that is being handled was raised, without torch's
    frames."""
    error = sys.exc_info()[1]
    deepest: tuple[Location, ...] = ()
    seen = 0
    while error is not None and seen < 8:
        frames = traceback.extract_tb(error.__traceback__, limit=-60)
        kept = [frame for frame in frames if changeable(frame.filename, own_prefixes())]
        deepest = from_summaries(kept) or deepest
        error = error.__cause__ or error.__context__
        seen += 1
    return deepest[-20:]


def translated_stack(translator: Any) -> tuple[Location, ...]:
    """The user's stack of a bytecode translator and of those that inlined it, outermost first, with columns."""
    frames: list[Location] = []
    while translator is not None and len(frames) < _DEEPEST:
        code = getattr(translator, "f_code", None)
        if code is not None:
            frames.append(_position(translator, code))
        translator = getattr(translator, "parent", None)
    return tuple(reversed(frames))


def _position(translator: Any, code: Any) -> Location:
    positions = getattr(getattr(translator, "current_instruction", None), "positions", None)
    line = getattr(translator, "lineno", None)
    if not isinstance(line, int) or line < 1:
        line = code.co_firstlineno
    if positions is not None and positions.lineno is not None:
        return place(
            code.co_filename,
            positions.lineno,
            code.co_name,
            positions.end_lineno,
            positions.col_offset,
            positions.end_col_offset,
        )
    return place(code.co_filename, line, code.co_name)


_Call = tuple[str, Any, Any, Any]


def _climb(frame: FrameType | None) -> tuple[Any, list[_Call]]:
    """The innermost translator above ``frame``, and the tracer's calls between the two, innermost first.

    The ``autograd.Function`` that is being traced, if any, comes last. A call is (method, variable, arguments,
    keywords)."""
    translator_class, variable_class = _compat.translator_class(), _compat.variable_class()
    innermost = None
    calls: list[_Call] = []
    for _ in range(_DEEPEST):
        if frame is None or translator_class is None or variable_class is None:
            break
        name = frame.f_code.co_name
        if frame.f_code.co_varnames[:1] == ("self",):
            held = frame.f_locals
            owner = held.get("self")
            if isinstance(owner, translator_class):
                innermost = innermost or owner
            elif isinstance(owner, variable_class):
                function = type(owner).__name__ == "AutogradFunctionVariable"
                if function or (innermost is None and name in _CALLS):
                    method = "" if name == "call_function" else str(held.get("name", ""))
                    calls.append((method, owner, held.get("args", ()), held.get("kwargs") or {}))
                if function:
                    break
        if name == "_compile":
            break
        frame = frame.f_back
    return innermost, calls


def _called(calls: list[_Call]) -> Called | None:
    """The innermost call that can be described."""
    for method, variable, arguments, keywords in calls:
        if type(variable).__name__ == "AutogradFunctionVariable":
            continue
        try:
            return describe(variable, arguments, keywords, method)
        except Exception:
            continue
    return None


def _phase(frame: FrameType | None) -> str:
    """``backward`` where the tracer is inside the backward of an ``autograd.Function``, else ``forward``."""
    for _ in range(_DEEPEST):
        if frame is None or frame.f_code.co_name == "_compile":
            break
        if "backward" in frame.f_code.co_name or "bwd" in frame.f_code.co_name:
            return "backward"
        frame = frame.f_back
    return "forward"
