"""What a break costs a step: the time between the graphs at its place, less the called kernel's own, with an interval.

A number comes only from a step that was seen to repeat often enough for a 95 % interval; else the cost is unknown.
"""

from __future__ import annotations

from math import comb
from statistics import median

from opgraft.diagnostics.diagnose.story import Story
from opgraft.diagnostics.model import Cost

LEAST_LAPS = 6
"""Below six repeats the smallest and the largest of them do not yet enclose the median in 95 of 100 cases."""
CHEAP = 0.01


def cost_of(story: Story, ids: set[str], callee: str, step_us: float | None) -> Cost:
    """The cost of the break that ends the graphs ``ids``; ``callee`` is the name of what was called in the gap."""
    bytes_a_step = _bytes(story, ids)
    laps = story.laps
    places = [index for index, graph in enumerate(laps.graphs) if graph in ids and index + 1 < len(laps.graphs)]
    if not places or laps.steps < LEAST_LAPS:
        return Cost(bytes_per_step=bytes_a_step, how="counted" if bytes_a_step is not None else "unknown")
    own = sum(_own_time(story, laps.graphs[index], callee) for index in places)
    count = min(len(laps.gap_us[index]) for index in places)
    totals = [max(0.0, sum(laps.gap_us[index][lap] for index in places) - own) for lap in range(count)]
    if len(totals) < LEAST_LAPS:
        return Cost(bytes_per_step=bytes_a_step, how="counted" if bytes_a_step is not None else "unknown")
    low, high = median_interval(totals)
    middle = median(totals)
    return Cost(
        us_per_step=middle,
        low=low,
        high=high,
        bytes_per_step=bytes_a_step,
        share_of_step=middle / step_us if step_us else None,
        how="measured",
    )


def own_time_known(story: Story, ids: set[str], callee: str) -> bool:
    """True where the callee's own time was seen and taken off."""
    return any(_own_time(story, graph, callee) > 0 for graph in ids)


def median_interval(values: list[float], level: float = 0.95) -> tuple[float, float]:
    """An interval for the median that holds for any distribution: the order statistics that the binomial law gives."""
    ordered = sorted(values)
    count = len(ordered)
    outside = 0.0
    rank = 0
    while rank < count // 2:
        outside += 2 * comb(count, rank) * 0.5**count
        if outside > 1 - level:
            break
        rank += 1
    rank = max(rank - 1, 0)
    return ordered[rank], ordered[count - 1 - rank]


def _own_time(story: Story, graph: str, callee: str) -> float:
    """Median microseconds that the callee itself ran in the gap after ``graph``; 0 where it was not seen."""
    samples = story.laps.callee_us.get(graph, {}).get(callee.rpartition(".")[2], ())
    return median(samples) if samples else 0.0


def _bytes(story: Story, ids: set[str]) -> int | None:
    """Bytes a step that leave the graphs before the break: each is written to memory and read again behind it."""
    if story.laps.steps < 2:
        return None
    total = 0
    for graph in story.laps.graphs:
        if graph in ids:
            frame = story.frames.get(graph)
            if frame is None or frame.output_bytes is None:
                return None
            total += frame.output_bytes
    return total or None
