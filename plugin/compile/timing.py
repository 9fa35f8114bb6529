"""Times two candidates so that a disturbance hits both, and says whether one is faster by more than the noise."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

clock: Callable[[], float] = time.perf_counter
# For work of one thread on a CPU: what other processes take of the core meanwhile is then no time of a candidate's.
busy: Callable[[], float] = time.process_time

_BLOCK_SECONDS = 1e-3  # long against the clock's step and one interrupt
_ROUNDS = (9, 41)
_LEAST_GAIN = 0.02  # below this share a choice is not worth a kernel's risk


@dataclass(frozen=True)
class Samples:
    """Seconds a call of each candidate, one pair of blocks a round, in ABBA order: ``(a, b, b, a)``."""

    rounds: tuple[tuple[float, float, float, float], ...]

    @property
    def medians(self) -> tuple[float, float]:
        """Median seconds a call of the first and of the second."""
        return (
            statistics.median(t for r in self.rounds for t in (r[0], r[3])),
            statistics.median(t for r in self.rounds for t in (r[1], r[2])),
        )


@dataclass(frozen=True)
class Verdict:
    """``ratio``: the first's time over the second's, with a 95 % interval. ``noise``: that of one to itself."""

    ratio: float
    interval: tuple[float, float]
    noise: float

    @property
    def second_wins(self) -> bool:
        """True where the second is faster by more than the noise, whatever in the interval is the truth."""
        return self.interval[0] > 1.0 + max(self.noise, _LEAST_GAIN)

    @property
    def second_loses(self) -> bool:
        """True where the second is slower by more than the noise."""
        return self.interval[1] < 1.0 / (1.0 + max(self.noise, _LEAST_GAIN))

    @property
    def clear(self) -> bool:
        """True where more samples would change nothing: one wins, or neither can win."""
        return self.second_wins or self.second_loses or self.interval[1] < 1.0 + _LEAST_GAIN

    @property
    def second_is_faster(self) -> bool:
        """True where the second is faster by any amount that can be told from noise: for a whole stretch of a model,
        in which a gain at one site is a small share."""
        return self.interval[0] > 1.0 + self.noise

    @property
    def second_is_slower(self) -> bool:
        """True where the second is slower by any amount that can be told from noise."""
        return self.interval[1] < 1.0 / (1.0 + self.noise)


def interleave(
    first: Callable[[], None],
    second: Callable[[], None],
    *,
    seconds: float,
    synchronise: Callable[[], None] = lambda: None,
    tick: Callable[[], float] | None = None,
) -> Samples:
    """Warms both up and times them by turns until ``seconds`` are used or enough rounds are done.

    At least nine rounds are taken: fewer give no 95 % interval of a median. ``tick`` is the clock of a block, where it
    is not that of the whole.
    """
    started, tick = clock(), tick or clock
    calls = 1
    for function in (first, second, first, second):
        synchronise()
        before = tick()
        function()
        synchronise()
        once = max(tick() - before, 1e-7)
        calls = max(1, min(1000, math.ceil(_BLOCK_SECONDS / once)))

    def block(function: Callable[[], None]) -> float:
        synchronise()
        before = tick()
        for _ in range(calls):
            function()
        synchronise()
        return max(tick() - before, 1e-9) / calls

    rounds: list[tuple[float, float, float, float]] = []
    least, most = _ROUNDS
    while len(rounds) < least or (len(rounds) < most and clock() - started < seconds):
        rounds.append((block(first), block(second), block(second), block(first)))
    return Samples(tuple(rounds))


def until(
    enough: Callable[[Verdict], bool],
    first: Callable[[], None],
    second: Callable[[], None],
    *,
    seconds: float,
    patience: float,
    synchronise: Callable[[], None] = lambda: None,
    tick: Callable[[], float] | None = None,
) -> Samples:
    """Interleaves for ``seconds``, and again while the verdict is not ``enough`` and ``patience`` is not used up."""
    started = clock()
    samples = interleave(first, second, seconds=seconds, synchronise=synchronise, tick=tick)
    while not enough(judge(samples)) and clock() - started < patience:
        more = interleave(first, second, seconds=seconds, synchronise=synchronise, tick=tick)
        samples = Samples(samples.rounds + more.rounds)
    return samples


def until_returned(
    first: Callable[[], None],
    second: Callable[[], None],
    *,
    synchronise: Callable[[], None] = lambda: None,
    rounds: int = 21,
) -> Samples:
    """Times what the host needs of each: until the call returns, which may be before the device is done."""

    def once(function: Callable[[], None]) -> float:
        synchronise()
        before = clock()
        function()
        return max(clock() - before, 1e-9)

    found = Samples(tuple((once(first), once(second), once(second), once(first)) for _ in range(rounds)))
    synchronise()
    return found


def judge(samples: Samples) -> Verdict:
    """Median of the paired ratios, its distribution-free interval, and the noise from pairs of one candidate."""
    ratios = sorted(math.log((r[0] + r[3]) / (r[1] + r[2])) for r in samples.rounds)
    low, high = ratios[_rank(len(ratios))], ratios[-1 - _rank(len(ratios))]
    itself = [abs(math.log(r[0] / r[3])) for r in samples.rounds] + [abs(math.log(r[1] / r[2])) for r in samples.rounds]
    # A round averages two blocks of each candidate, and the median many rounds: the noise shrinks by both.
    noise = 1.2533 * 1.4826 * statistics.median(itself) / math.sqrt(2.0 * len(ratios))
    return Verdict(math.exp(statistics.median(ratios)), (math.exp(low), math.exp(high)), math.expm1(noise))


def _rank(n: int) -> int:
    """The order statistic below the median with 97.5 % (binomial; Conover, Practical Nonparametric Statistics)."""
    rank, below = 0, 0.5**n
    while rank + 1 < (n + 1) // 2:
        below += math.comb(n, rank + 1) * 0.5**n
        if below > 0.025:
            break
        rank += 1
    return rank
