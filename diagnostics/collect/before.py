"""What was compiled before a watch began, as events: from torch's own records (H3, H5), for a watcher that attaches
late.

Nothing compiles again in a process that is warm, so the trace (H1) says nothing there. But torch remembers: the
reasons of every graph break with the user's stack, and a row of metrics for each of the newest compiles. Ids of these
events begin with ``?``: torch may give the same number again after a reset."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from opgraft.diagnostics import _compat
from opgraft.diagnostics.collect import events
from opgraft.diagnostics.collect.guards import guarded_value
from opgraft.diagnostics.collect.message_text import parse_messages
from opgraft.diagnostics.collect.place import from_summaries, function_name, place
from opgraft.diagnostics.collect.trace import read_metrics
from opgraft.diagnostics.model import Location

MARK = "?"
MISSING = "what was compiled before the watch is not seen: torch keeps no compilation metrics"
_MOST = 512


def compiled_before() -> Iterator[events.Event]:
    """The compiles that torch remembers, oldest first, each with its break or failure."""
    reasons = _compat.break_reasons()[-_MOST:]
    number = 0
    for row in _compat.compilation_rows():
        identity = str(row.get("compile_id") or "")
        if row.get("is_forward") is False or "/" not in identity:
            continue
        common: dict[str, Any] = {"id": MARK + identity}
        own = place(str(row.get("co_filename") or ""), row.get("co_firstlineno"), str(row.get("co_name") or ""))
        yield events.CompileBegan(stack=(own,), **common)
        if row.get("recompile_reason"):
            reason = str(row["recompile_reason"])
            yield events.Recompiled(
                reasons=(reason[:4000],),
                place=guarded_value(reason, own),
                function=str(row.get("co_name") or ""),
                path=own.path,
                **common,
            )
        broken = _take(reasons, own)
        if broken is not None:
            stack = from_summaries(broken.user_stack)
            number -= 1
            yield from _break(number, str(broken.reason), stack, common, skipped=False)
        elif row.get("fail_type") and row.get("has_guarded_code") is False:
            where = place(str(row.get("fail_user_frame_filename") or ""), row.get("fail_user_frame_lineno"))
            number -= 1
            yield from _break(number, str(row.get("fail_reason") or ""), (where,), common, skipped=True)
        if row.get("graph_op_count"):
            yield events.Graph(ops=int(row["graph_op_count"]), location=own, **common)
        yield read_metrics(row, common)


def _break(
    number: int, reason: str, stack: tuple[Location, ...], common: dict[str, Any], skipped: bool
) -> Iterator[events.Event]:
    messages = parse_messages(reason, stack, number, common)
    yield from messages[:1]
    yield events.Broke(
        location=stack[-1] if stack else Location(path="", line=0),
        reason=reason[:4000],
        skipped=skipped,
        messages=tuple(message.number for message in messages[:1]),
        stack=stack,
        **common,
    )


def _take(reasons: list[Any], own: Location) -> Any:
    """Takes out of ``reasons`` the first break of the frame whose code begins at ``own``."""
    for index, reason in enumerate(reasons):
        outermost = reason.user_stack[0] if reason.user_stack else None
        if (
            outermost is not None
            and outermost.filename == own.path
            and function_name(outermost.name) == own.function
            and (outermost.lineno or 0) >= own.line
        ):
            return reasons.pop(index)
    return None
