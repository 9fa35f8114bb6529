"""Calls of compiled graphs -> the repeating step: which graphs it runs, in what order, how long each takes and the
gaps.

A step is found, not declared: it is the shortest run of graph calls that repeats up to the end of the watch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from opgraft.diagnostics.collect.events import Laps

Call = tuple[str, int, int]
"""Compile id of the graph, start and end in nanoseconds."""
Window = tuple[int, int]
_LONGEST_STEP = 4096
_KEPT = 64


def summarise(calls: Sequence[Call], compiles: Sequence[Window] = (), counts: dict[str, int] | None = None) -> Laps:
    """The step that the calls repeat. Calls during or before the last compile that one of the repeats met do not
    count."""
    totals = dict(counts) if counts is not None else dict(Counter(name for name, _, _ in calls))
    last_compile = max((end for _, end in compiles), default=0)
    warm = [call for call in calls if call[1] >= last_compile]
    period = find_period([name for name, _, _ in warm])
    if period == 0:
        return Laps(calls=totals)
    names = [name for name, _, _ in warm]
    repeats = _repeats(names, period)
    first = len(warm) - repeats * period
    offset = _entry(names[first : first + period])
    first += offset
    whole = (len(warm) - first) // period
    if whole < 2:
        first, whole, offset = first - offset, repeats, 0
    kept = range(max(0, whole - _KEPT), whole)
    graphs = tuple(names[first : first + period])
    spans: list[list[float]] = [[] for _ in graphs]
    gaps: list[list[float]] = [[] for _ in graphs]
    for lap in kept:
        for index in range(period):
            at = first + lap * period + index
            _, start, end = warm[at]
            spans[index].append((end - start) / 1000)
            if at + 1 < len(warm):
                gaps[index].append((warm[at + 1][1] - end) / 1000)
    return Laps(
        graphs=graphs,
        us=tuple(map(tuple, spans)),
        gap_us=tuple(map(tuple, gaps)),
        steps=whole,
        calls=totals,
    )


def find_period(names: Sequence[str]) -> int:
    """The shortest period that the end of ``names`` repeats at least twice and that covers most of it; 0 if none
    does."""
    for period in range(1, min(len(names) // 2, _LONGEST_STEP) + 1):
        if names[-1] == names[-1 - period] and _repeats(names, period) * period * 5 >= len(names) * 3:
            return period
    return 0


def _repeats(names: Sequence[str], period: int) -> int:
    same = period
    while same < len(names) and names[-1 - same] == names[-1 - same + period]:
        same += 1
    return same // period


def _entry(step: Sequence[str]) -> int:
    """Where the step begins: the first graph that was compiled first."""

    def order(name: str) -> tuple[int, int]:
        frame, _, compiled = name.partition("/")
        return (int(frame) if frame.isdigit() else 1 << 30, int(compiled) if compiled.isdigit() else 0)

    return min(range(len(step)), key=lambda index: (order(step[index])[0], index))
