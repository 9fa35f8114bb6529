"""Records the calls of custom ops in the user's program, and has them checked when the program has ended.

The checks run in a fork of the program's own process, where every registration is alive, and leave what they found in
the recording; ``recorded.check_recorded_calls`` reads it.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from opgraft.diagnostics import _compat
from opgraft.diagnostics.collect import arrival
from opgraft.diagnostics.collect import place as places
from opgraft.diagnostics.conform.lab import graphs, happenings, isolate, met, site, tap
from opgraft.diagnostics.conform.lab.graphs import Graph
from opgraft.diagnostics.conform.lab.met import Book, Met

SECONDS = 70.0
SECONDS_BEFORE_LOSS = 15.0


def install(recording: Path) -> Callable[[], None]:
    """Starts to record, as soon as the program has imported torch.

    Args:
        recording: the file that the findings are left in.

    Returns:
        What ends the recording: to be called when the program has ended and other hooks are gone. It takes the taps
        away and runs the checks, at most for about ``SECONDS``.
    """
    book = Book()
    stream = recording.open("w", encoding="utf-8")

    def journal(say: str, entry: Met | None) -> None:
        line: dict[str, Any] = {"say": say}
        if entry is not None:
            place = entry.location
            line |= {"op": entry.name, "path": place.path if place else "", "line": place.line if place else 0}
            line |= {
                "composite": _compat.has_kernel(entry.name, "CompositeImplicitAutograd"),
                "subclass": entry.subclass,
            }
        stream.write(json.dumps(line) + "\n")
        stream.flush()

    listener = tap.Listener(book, journal)

    def before_loss(names: frozenset[str]) -> None:
        gone = {key: call for key, call in book.calls.items() if call.name in names}
        if gone:
            for key in gone:
                del book.calls[key]
            for counted in list(listener.counts):
                if counted.partition("|")[0] in names:
                    del listener.counts[counted]
            _check(Book(calls=gone, events=list(book.events)), [], stream, SECONDS_BEFORE_LOSS)

    listener.before_loss = before_loss

    def begin(torch: ModuleType) -> None:
        tap.hide_from_compiler((tap, met, site, happenings, graphs, places, _compat, sys.modules[__name__]))
        tap.take_hold(torch, listener)
        happenings.watch(torch, listener)

    kept: list[Graph] = []
    forget = [
        arrival.when_imported("torch", begin),
        arrival.when_imported("torch._dynamo.output_graph", lambda _: graphs.watch(listener, kept)),
    ]
    owner = os.getpid()

    def stop() -> None:
        for take_back in forget:
            take_back()
        listener.on = False
        for undo in reversed(listener.undo):
            undo()
        listener.undo.clear()
        if os.getpid() != owner or "torch" not in sys.modules:
            return
        if not book.calls and not book.events:
            return
        _check(book, kept, stream)

    return stop


def _check_elsewhere(book: Book, stream: Any, seconds: float) -> None:
    """Has the ops examined in another process, where CUDA is in use in this one."""
    from opgraft.diagnostics.conform.lab.after import check_book_elsewhere

    def send(message: isolate.Message) -> None:
        stream.write(json.dumps(message) + "\n")
        stream.flush()

    try:
        check_book_elsewhere(book, str(getattr(sys.modules.get("__main__"), "__file__", None) or ""), send, seconds)
    except Exception as error:
        send({"say": "not-run", "why": f"custom ops were not checked: {type(error).__name__}: {error}"})


def _check(book: Book, kept: list[Graph], stream: Any, seconds: float = SECONDS) -> None:
    """Runs the checks in a fork and writes what they say."""
    if not isolate.can_fork():
        _check_elsewhere(book, stream, seconds)
        return

    def work(send: isolate.Send) -> None:
        # libgomp's threads did not come along with the fork: a parallel region would wait for them forever.
        sys.modules["torch"].set_num_threads(1)
        from opgraft.diagnostics.conform.lab.after import check_book

        check_book(book, kept, send, seconds)

    def receive(message: isolate.Message) -> None:
        stream.write(json.dumps(message) + "\n")
        stream.flush()

    ending = isolate.run_isolated(work, receive, seconds=seconds + 15.0)
    if ending.how != "done":
        why = ending.detail.strip().splitlines()[-1:] or [ending.sentence]
        receive({"say": "not-run", "why": f"custom ops were not checked to the end: {why[0]}", "detail": ending.detail})
