"""Calls of compiled graphs -> the repeating step: which graphs it runs, in what order, how long each takes and the
gaps.

A step is found, not declared: it is the shortest run of graph calls that repeats up to the end of the watch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

from opgraft.diagnostics.collect.events import Laps

Call = tuple[str, int, int]
"""Compile id of the graph or ENTRY, start and end in nanoseconds."""
Window = tuple[int, int]
ENTRY = ""
"""The name of a call that is no graph: a compiled callable was entered, at which a step can begin."""
_LONGEST_STEP = 4096
_KEPT = 64


def summarise(calls: Sequence[Call], compiles: Sequence[Window] = ()) -> Laps:
    """The step that the calls repeat. Calls before the end of the last compile do not count."""
    totals = dict(Counter(name for name, _, _ in calls if name != ENTRY))
    last_compile = max((end for _, end in compiles), default=0)
    warm = [call for call in calls if call[1] >= last_compile]
    names = [name for name, _, _ in warm]
    period = find_period(names)
    if period == 0 or (ENTRY not in names[-period:] and any(name == ENTRY for name, _, _ in calls)):
        # Equal layers within one call of a compiled callable repeat too; that is no step.
        return Laps(calls=totals)
    first = len(warm) - _repeats(names, period) * period
    first += _entry(names[first : first + period])
    laps = [
        [call for call in warm[start : start + period] if call[0] != ENTRY]
        for start in range(first, len(warm) - period + 1, period)
    ]
    if len(laps) < 2 or not laps[0]:
        return Laps(calls=totals)
    kept = laps[-_KEPT:]
    begins = [lap[0][1] for lap in kept]
    size = len(kept[0])
    return Laps(
        graphs=tuple(name for name, _, _ in kept[0]),
        us=tuple(tuple((lap[i][2] - lap[i][1]) / 1000 for lap in kept) for i in range(size)),
        gap_us=tuple(tuple((lap[i + 1][1] - lap[i][2]) / 1000 for lap in kept) for i in range(size - 1)),
        step_us=tuple((after - before) / 1000 for before, after in pairwise(begins)),
        steps=len(laps),
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
    """Where the step begins: at the entry before the graph that was compiled first, or at that graph."""

    def order(name: str) -> tuple[int, int]:
        frame, _, compiled = name.lstrip("?").partition("/")
        return (int(frame) if frame.isdigit() else 1 << 30, int(compiled) if compiled.isdigit() else 0)

    graphs = [index for index, name in enumerate(step) if name != ENTRY]
    if not graphs:
        return 0
    first = min(graphs, key=lambda index: (order(step[index]), index))
    for back in range(1, len(step)):
        if step[first - back] == ENTRY:  # counts on from the end where the step wraps
            return (first - back) % len(step)
    return first
