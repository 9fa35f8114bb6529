"""When every compiled graph runs: a clock around each graph's call, put in when the graph is made and taken out again.

Generated code reaches a graph through a global of the frame's module, so the clock replaces that global and nothing
else, once however many watchers listen. It costs two reads of the clock and one append a graph call, and keeps the
newest calls only."""

from __future__ import annotations

import functools
import sys
import time
from collections import deque
from collections.abc import Callable
from types import FrameType
from typing import Any

from opgraft.diagnostics import _compat
from opgraft.diagnostics.collect.callee_times import CalleeTimes
from opgraft.diagnostics.collect.laps import ENTRY, Call

NEWEST = 1 << 15
PREFIX = "__compiled_fn"


class GraphClock:
    """The calls of compiled graphs, as one watcher sees them. ``calls`` holds the newest.

    ``entered`` holds where the code of the compiled callables begins that were entered. Only a watcher that attached
    late wants it: it must know what runs, also where no graph does."""

    def __init__(self) -> None:
        self.calls: deque[Call] = deque(maxlen=NEWEST)
        self.append = self.calls.append
        self.callees: CalleeTimes | None = None
        self.entered: set[str] | None = None


_clocks: list[GraphClock] = []
_record: list[Callable[[Call], None]] = []
_sampling: list[CalleeTimes] = []
_wanting: list[set[str]] = []
_known: dict[int, Any] = {}
_installed: list[tuple[dict[str, Any], str, Any, Any]] = []


def start(clock: GraphClock, existing: bool) -> None:
    """Lets ``clock`` see every graph call from now on; with ``existing`` also of graphs that were compiled before."""
    _clocks.append(clock)
    _choose_record()
    if clock.callees is not None:
        _sampling.append(clock.callees)
    if existing:
        clock.entered = set()
        _wanting.append(clock.entered)
        _known.clear()
        _wrap_existing()


def stop(clock: GraphClock) -> None:
    """Ends that; with the last clock every graph is put back as it was."""
    if clock in _clocks:
        _clocks.remove(clock)
    _choose_record()
    if clock.callees in _sampling:
        _sampling.remove(clock.callees)
    _wanting[:] = [entered for entered in _wanting if entered is not clock.entered]
    if _clocks:
        return
    _known.clear()
    for scope, name, graph, timed in _installed:
        if scope.get(name) is timed:
            scope[name] = graph
    _installed.clear()


def listen_to_entries(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """``original``, torch's function that every entered compiled callable asks for its callback, with the entry noted:
    a step can begin there. It runs on every call of a compiled callable, so it does no more than it must."""
    record, now, wanting, known = _record, time.perf_counter_ns, _wanting, _known

    def _callback_from_stance(callback: Any) -> Any:
        if callback:  # torch asks with None for every function that it keeps its tracer out of
            time_ = now()
            record[0]((ENTRY, time_, time_))
            if wanting and id(callback) not in known:
                _first_entry(callback, sys._getframe(1))
        return original(callback)

    return functools.update_wrapper(_callback_from_stance, original)


def _first_entry(callback: Any, caller: FrameType) -> None:
    """Notes which callable it is that has ``callback``, once a callable."""
    _known[id(callback)] = callback  # kept alive, so that the id is not given again
    where = _beginning(caller.f_locals.get("fn"))
    for entered in _wanting:
        entered.add(where)


def _to_nobody(call: Call) -> None:
    return


def _to_all(call: Call) -> None:
    for clock in _clocks:
        clock.append(call)


def _choose_record() -> None:
    """One watcher is the rule: its deque gets the calls without a function in between."""
    _record[:] = [_clocks[0].append if len(_clocks) == 1 else _to_all if _clocks else _to_nobody]


def _beginning(function: Any) -> str:
    """``path:line`` at which the code of a function, or of a module's ``forward``, begins; "" where it has none."""
    for _ in range(16):
        inner = getattr(function, "_torchdynamo_orig_callable", None) or getattr(function, "__wrapped__", None)
        if inner is None:
            break
        function = inner
    function = (
        getattr(function, "__self__", None) if hasattr(getattr(function, "__self__", None), "forward") else function
    )
    function = getattr(function, "forward", function)
    code = getattr(function, "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code is not None else ""


def wrap(scope: dict[str, Any], name: str, identity: str) -> None:
    """Puts the clock around the graph that ``scope[name]`` is."""
    graph = scope.get(name)
    if not callable(graph) or any(graph is timed for *_, timed in _installed):
        return
    timed = _timed(graph, identity)
    scope[name] = timed
    _installed.append((scope, name, graph, timed))
    if len(_installed) % 1024 == 0:
        _installed[:] = [entry for entry in _installed if entry[0].get(entry[1]) is entry[3]]


def _wrap_existing() -> None:
    known = _compat.graph_names()
    for module in list(sys.modules.values()):
        scope = getattr(module, "__dict__", None)
        if isinstance(scope, dict):
            for name in [key for key in list(scope) if isinstance(key, str) and key.startswith(PREFIX)]:
                wrap(scope, name, f"?{known.get(name) or name[len(PREFIX) :].split('_')[1]}")


def _timed(graph: Callable[..., Any], identity: str) -> Callable[..., Any]:
    record, sampling, now = _record, _sampling, time.perf_counter_ns

    def compiled_graph(*args: Any, **kwargs: Any) -> Any:
        if sampling:
            for callees in sampling:
                callees.enter_graph()
        start = now()
        try:
            return graph(*args, **kwargs)
        finally:
            record[0]((identity, start, now()))
            if sampling:
                for callees in sampling:
                    callees.leave_graph(identity)

    _compat.skip_code(compiled_graph.__code__)
    return compiled_graph
