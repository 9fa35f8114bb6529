"""From paired log-ratios to an interval and a verdict.

The data have two levels: blocks within a process, processes within a run. A process carries effects of its own (memory
addresses, the compiler's choices, clocks) that more blocks never average out, so the processes are the sample and the
blocks only sharpen each of them. With one or two processes the blocks are cut into batches long enough to be nearly
independent, and the interval holds for these processes alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from opgraft.diagnostics.model import Verdict

EQUIVALENCE = 0.005
# The interval that is printed covers 95 %. A verdict claims a direction, and is held to 1 in 200:
# below the 1 in 100 that is promised, since runs stop early when they are sure.
CONFIDENCE = 0.95
VERDICT_LEVEL = 0.005
_BATCHES = 8
# Fewer processes than this say nothing about what differs between processes: their blocks are the sample then.
LEAST_PROCESSES = 3
# Blocks before the first look at whether a run may stop, and between looks: batches of four and more, so that one
# interrupted block moves no batch.
FIRST_LOOK = 32
NEXT_LOOK = 16

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Interval:
    """A log-ratio with its interval. ``se`` is the standard error, ``df`` its degrees of freedom, ``p`` two-sided for
    no difference, and ``mde`` the smallest effect that this much data would find in 8 runs of 10."""

    estimate: float
    low: float
    high: float
    se: float
    df: float
    p: float
    mde: float
    processes: int
    blocks: int

    def at(self, confidence: float) -> tuple[float, float]:
        """The interval at another confidence."""
        half = float(stats.t.ppf(0.5 + confidence / 2, self.df)) * self.se
        return self.estimate - half, self.estimate + half


def location(values: Array, axis: int = -1) -> Array:
    """A centre that heavy tails do not move: the mean of the middle half (the interquartile mean)."""
    ordered = np.sort(values, axis=axis)
    count = ordered.shape[axis]
    if count < 4:
        return np.asarray(np.median(ordered, axis=axis))
    cut = count // 4
    return np.asarray(np.take(ordered, np.arange(cut, count - cut), axis=axis).mean(axis=axis))


def batched(series: Array, batches: int = _BATCHES) -> list[Array]:
    """Cuts one process's blocks, in order, into batches of equal length."""
    count = max(2, min(batches, len(series) // 2)) if len(series) >= 4 else len(series)
    return list(np.array_split(series, count))


def interval(ratios: Sequence[Sequence[float]]) -> Interval | None:
    """The 95 % interval of the log-ratio, from the blocks of every process.

    The standard error is that of a hierarchical bootstrap (processes drawn with replacement, then blocks within each)
    with infinitely many draws. Drawing blocks inside drawn processes counts the blocks' noise twice; with that part
    taken out again and the factor for few processes put in (Davison and Hinkley, Bootstrap Methods, 3.8), what remains
    has the closed form S^2 / n over the centres of the processes, and goes with Student's t of n - 1 degrees.

    Args:
        ratios: log-ratios by process, in the order in which the blocks ran.

    Returns:
        None where there are fewer than two blocks.
    """
    groups = [np.asarray(r, dtype=np.float64) for r in ratios if len(r) > 0]
    processes, blocks = len(groups), sum(len(g) for g in groups)
    if blocks < 2:
        return None
    if processes < LEAST_PROCESSES:
        groups = [batch for g in groups for batch in batched(g, _BATCHES // processes)]
    centres = np.array([float(location(g)) for g in groups])
    estimate, count = float(centres.mean()), len(centres)
    se = math.sqrt(max(float(centres.var(ddof=1)) / count, 1e-18))
    df = count - 1
    half = float(stats.t.ppf(0.5 + CONFIDENCE / 2, df)) * se
    p = float(2 * stats.t.sf(abs(estimate) / se, df))
    mde = float(stats.t.ppf(0.5 + CONFIDENCE / 2, df) + stats.t.ppf(0.8, df)) * se
    return Interval(estimate, estimate - half, estimate + half, se, df, p, mde, processes, blocks)


def level(
    logs: Sequence[Sequence[float]], *, seed: int = 0, resamples: int = 1000
) -> tuple[float, float, float] | None:
    """Centre of a quantity's logs with a 95 % percentile interval of the hierarchical bootstrap: a step's own time.

    Args:
        logs: by process, in the order in which the blocks ran.
    """
    groups = [np.asarray(r, dtype=np.float64) for r in logs if len(r) > 0]
    if not groups:
        return None
    if len(groups) < LEAST_PROCESSES:
        groups = [batch for g in groups for batch in batched(g, _BATCHES // len(groups))]
    centre = float(np.mean([float(location(g)) for g in groups]))
    draws = bootstrap(groups, np.random.default_rng(seed), resamples)
    low, high = np.quantile(draws, [0.5 - CONFIDENCE / 2, 0.5 + CONFIDENCE / 2])
    return centre, float(low), float(high)


def bootstrap(groups: Sequence[Array], generator: np.random.Generator, resamples: int) -> Array:
    """Estimates from groups drawn with replacement and blocks drawn with replacement inside each."""
    count = len(groups)
    drawn = np.stack([location(g[generator.integers(0, len(g), (resamples, len(g)))]) for g in groups], axis=1)
    # A group that is drawn twice gets blocks of its own each time: rows are picked for every place anew.
    picks = generator.integers(0, count, (resamples, count))
    rows = generator.integers(0, resamples, (resamples, count))
    return np.asarray(drawn[rows, picks].mean(axis=1))


def holm(p_values: Mapping[str, float]) -> dict[str, float]:
    """Holm's adjusted p-values: several claims from one run are held to the error of one."""
    ordered = sorted(p_values, key=lambda name: p_values[name])
    adjusted: dict[str, float] = {}
    running = 0.0
    for rank, name in enumerate(ordered):
        running = max(running, min(1.0, (len(ordered) - rank) * p_values[name]))
        adjusted[name] = running
    return adjusted


def verdict(found: Interval, p: float | None = None, noise: Interval | None = None) -> Verdict:
    """FASTER or SLOWER where the direction is sure and larger than what the same arm shows against itself.

    Args:
        p: the p-value after correction for several claims; the interval's own by default.
        noise: the A/A arm's interval of the same run.
    """
    low, high = found.at(1 - VERDICT_LEVEL)
    if found.low > -EQUIVALENCE and found.high < EQUIVALENCE:
        return "EQUIVALENT"
    sure = (found.p if p is None else p) < VERDICT_LEVEL and (low > 0 or high < 0)
    floor = max(abs(noise.estimate), 0.0) if noise is not None else 0.0
    if sure and abs(found.estimate) > floor:
        return "FASTER" if found.estimate > 0 else "SLOWER"
    return "UNRESOLVED"


def decided(found: Interval | None) -> bool:
    """Whether the verdict is sure and the figure precise: used to stop early.

    Stopping at the first sure verdict would keep the estimates that chance made large. So the interval has to be narrow
    as well: a quarter of a percent, or a tenth of the effect.
    """
    if found is None:
        return False
    half = (found.high - found.low) / 2
    if half > max(EQUIVALENCE / 2, abs(found.estimate) / 10):
        return False
    return verdict(found) != "UNRESOLVED"


def median(values: Sequence[float]) -> float:
    return float(np.median(np.asarray(values))) if len(values) else math.nan


def lower_quartile(values: Sequence[float]) -> float:
    return float(np.quantile(np.asarray(values), 0.25))
