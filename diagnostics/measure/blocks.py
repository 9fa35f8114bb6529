"""Interleaved timing: every block runs every arm in a shuffled order and again in the reverse of it (ABBA).

Whatever drifts linearly during a block falls out of the ratio of two arms, and what jumps between blocks hits all arms.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import msgspec
import torch

from opgraft.diagnostics.measure import clock
from opgraft.diagnostics.measure.arms import Arm
from opgraft.diagnostics.measure.environment import Conditions, Probe


class Block(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds a step of each arm, and how the host issued them: the samples on the way out and on the way back."""

    seconds: dict[str, tuple[float, float]]
    issued: dict[str, tuple[clock.Issued, clock.Issued]] = {}
    conditions: Conditions = Conditions()

    def log(self, arm: str) -> float:
        first, second = self.seconds[arm]
        return 0.5 * (math.log(first) + math.log(second))


class Series(msgspec.Struct, frozen=True, kw_only=True):
    """The blocks of one process. ``recompiled`` names arms that compiled again while they were timed."""

    blocks: tuple[Block, ...]
    dropped: int = 0
    recompiled: tuple[str, ...] = ()
    seed: int = 0

    def ratios(self, arm: str, baseline: str) -> list[float]:
        """Log of baseline time over arm time, a block: above 0 the arm is faster."""
        return [b.log(baseline) - b.log(arm) for b in self.blocks if arm in b.seconds and baseline in b.seconds]

    def seconds(self, arm: str) -> list[float]:
        return [math.exp(b.log(arm)) for b in self.blocks if arm in b.seconds]

    def host_share(self, arm: str) -> float | None:
        """What the host needed to issue the steps over what they took: the median of the blocks."""
        return self._share(arm, lambda issued: issued[-1][1] / issued[-1][0])

    def paced_share(self, arm: str, device_seconds: float) -> float | None:
        """What steps take by the host's clock and the GPU's own time alone, over what they took: the blocks' median."""
        return self._share(arm, lambda issued: clock.paced(issued, device_seconds))

    def _share(self, arm: str, seconds: Callable[[clock.Issued], float]) -> float | None:
        shares = [sum(map(seconds, b.issued[arm])) / sum(b.seconds[arm]) for b in self.blocks if arm in b.issued]
        return statistics.median(shares) if shares else None


def run_blocks(
    arms: Sequence[Arm],
    device: torch.device,
    *,
    deadline: float,
    most: int = 200,
    least: int = 4,
    seed: int = 0,
    step_seconds: Mapping[str, float],
    occasional: frozenset[str] = frozenset(),
    probe: Probe | None = None,
    enough: Callable[[Sequence[Block]], bool] | None = None,
    progress: Callable[[float], None] | None = None,
) -> Series:
    """Times the arms block by block until ``deadline`` (``time.monotonic``), ``most`` blocks, or ``enough``.

    Args:
        step_seconds: what a step of each arm takes, from the warm-up; sets the steps of a sample.
        occasional: arms that only the first ``least`` blocks run (those that take no verdict).
        probe: reads clocks and throttling after each sample; a throttled block is thrown away and done again.
    """
    shuffle = random.Random(seed)
    steps = {arm.name: clock.steps_for(step_seconds[arm.name], device) for arm in arms}
    blocks: list[Block] = []
    dropped = 0
    compiles = {arm.name: 0 for arm in arms}
    begin = time.monotonic()
    while len(blocks) < most:
        now = time.monotonic()
        if len(blocks) >= least and (now >= deadline or (enough is not None and enough(blocks))):
            break
        order = [arm for arm in arms if len(blocks) < least or arm.name not in occasional]
        shuffle.shuffle(order)
        before = {arm.name: _graphs(arm) for arm in order}
        taken: dict[str, list[clock.Sample]] = {arm.name: [] for arm in order}
        if probe is not None:
            probe.begin()
        for arm in [*order, *reversed(order)]:
            with arm.installed():
                assert arm.step is not None
                taken[arm.name].append(clock.timed(arm.step, steps[arm.name], device))
        conditions = probe.end() if probe is not None else Conditions()
        again = [arm.name for arm in order if _graphs(arm) > before[arm.name]]
        for name in again:
            compiles[name] += 1
        # A block with a compile in it, or one that was throttled, is no sample of the steady step. It is done again
        # whole, all arms, so that no arm keeps only its better half. What never stops is reported and not waited for.
        hopeless = dropped > 2 * least + len(blocks)
        if (again or conditions.throttled) and not hopeless and now < deadline + 30:
            dropped += 1
            continue
        blocks.append(
            Block(
                seconds={n: (t[0].seconds, t[1].seconds) for n, t in taken.items()},
                issued={n: (t[0].issued, t[1].issued) for n, t in taken.items()},
                conditions=conditions,
            )
        )
        if progress is not None:
            span = max(deadline - begin, 1e-9)
            progress(min(1.0, max((time.monotonic() - begin) / span, len(blocks) / most)))
    return Series(
        blocks=tuple(blocks),
        dropped=dropped,
        recompiled=tuple(name for name, count in compiles.items() if count > 1),
        seed=seed,
    )


def _graphs(arm: Arm) -> int:
    return arm.backend.graphs if arm.backend is not None else 0
