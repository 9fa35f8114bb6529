"""When every compiled graph runs: a clock around each graph's call, put in when the graph is made and taken out again.

Generated code reaches a graph through a global of the frame's module, so the clock replaces that global and nothing else.
It costs two reads of the clock and one append a graph call, and keeps the newest calls only.
"""

from __future__ import annotations

import sys
import time
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

from opgraft.diagnostics import _compat
from opgraft.diagnostics.collect.laps import Call

NEWEST = 1 << 15
PREFIX = "__compiled_fn"


class GraphClock:
    """The calls of compiled graphs. ``calls`` holds the newest; ``counts`` counts all of them by compile id."""

    def __init__(self) -> None:
        self.calls: deque[Call] = deque(maxlen=NEWEST)
        self.counts: Counter[str] = Counter()
        self._installed: list[tuple[dict[str, Any], str, Any, Any]] = []

    def wrap(self, scope: dict[str, Any], name: str, identity: str) -> None:
        """Puts a clock around the graph that ``scope[name]`` is."""
        graph = scope.get(name)
        if not callable(graph):
            return
        timed = self._timed(graph, identity)
        scope[name] = timed
        self._installed.append((scope, name, graph, timed))
        if len(self._installed) % 1024 == 0:
            self._installed = [entry for entry in self._installed if entry[0].get(entry[1]) is entry[3]]

    def wrap_existing(self) -> int:
        """Puts clocks around the graphs that were compiled before; returns how many."""
        found = 0
        for module in list(sys.modules.values()):
            scope = getattr(module, "__dict__", None)
            if not isinstance(scope, dict):
                continue
            for name in [key for key in list(scope) if isinstance(key, str) and key.startswith(PREFIX)]:
                self.wrap(scope, name, f"?{name[len(PREFIX) :].split('_')[1]}")
                found += 1
        return found

    def remove(self) -> None:
        """Puts every graph back as it was."""
        for scope, name, graph, timed in self._installed:
            if scope.get(name) is timed:
                scope[name] = graph
        self._installed.clear()

    def _timed(self, graph: Callable[..., Any], identity: str) -> Callable[..., Any]:
        append, counts, now = self.calls.append, self.counts, time.perf_counter_ns

        def compiled_graph(*args: Any, **kwargs: Any) -> Any:
            start = now()
            try:
                return graph(*args, **kwargs)
            finally:
                append((identity, start, now()))
                counts[identity] += 1

        _compat.skip_code(compiled_graph.__code__)
        return compiled_graph
