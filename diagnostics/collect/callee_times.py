"""How much of an eager gap is the called kernel itself: a profile function for a few gaps, off for all others.

A break costs the gap minus the kernel's own time, which would be spent inside a graph as well. Only a run under
``opgraft explain`` samples; a program that has a profile function of its own is left alone.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from types import FrameType
from typing import Any

WARM = 4
SAMPLES = 12
_LONGEST = 20_000
_NAMES = 64


class CalleeTimes:
    """Samples the gaps after graphs that ended in a break. ``broken`` holds their compile ids."""

    def __init__(self) -> None:
        self.broken: set[str] = set()
        self.samples: dict[str, dict[str, list[float]]] = {}
        self._executions: Counter[str] = Counter()
        self._gap = ""
        self._totals: dict[str, int] = {}
        self._open: list[tuple[str, int]] = []
        self._events = 0

    def leave_graph(self, identity: str) -> None:
        """A graph has ended: looks into the gap after it, if it is one of the few to look into."""
        if identity not in self.broken:
            return
        self._executions[identity] += 1
        if not WARM < self._executions[identity] <= WARM + SAMPLES or sys.getprofile() is not None:
            return
        self._gap, self._totals, self._open, self._events = identity, {}, [], 0
        sys.setprofile(self._profile)

    def enter_graph(self) -> None:
        """The next graph begins: the gap is over."""
        if not self._gap:
            return
        sys.setprofile(None)
        names = self.samples.setdefault(self._gap, {})
        for name, total in self._totals.items():
            if name in names or len(names) < _NAMES:
                names.setdefault(name, []).append(total / 1000)
        self._gap = ""

    def _profile(self, frame: FrameType, event: str, argument: Any) -> None:
        now = time.perf_counter_ns()
        self._events += 1
        if self._events > _LONGEST:
            sys.setprofile(None)
            self._gap = ""
            return
        if event == "c_call":
            self._open.append((_native_name(argument), now))
        elif event == "call":
            self._open.append((frame.f_code.co_name, now))
        elif self._open:
            name, start = self._open.pop()
            self._totals[name] = self._totals.get(name, 0) + time.perf_counter_ns() - start


def _native_name(function: Any) -> str:
    return str(getattr(function, "__name__", ""))
