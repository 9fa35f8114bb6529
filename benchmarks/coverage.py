"""Does the interval cover, and does the verdict keep quiet? Synthetic runs with a known effect and realistic noise.

    python benchmarks/coverage.py [--repeats 2000]

Times are made sample by sample in the order in which ``measure/blocks.py`` takes them (ABBA, shuffled), with
slow drift, clocks that jump between two states, heavy tails, autocorrelation, and an effect that each process carries
by itself.
Seeds are fixed: the same command prints the same figures on any machine.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from opgraft.diagnostics.measure import statistics

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Noise:
    """Noise of the log of one sample. Every size is a standard deviation unless it says otherwise.

    Attributes:
        white: independent from sample to sample.
        process: what one process adds to an arm's log-ratio, the same for all its blocks.
        drift: total slope over a process, both arms alike.
        jump: distance between two clock states; ``stay`` is the chance to stay in one from sample to sample.
        tail: share of samples hit by an interruption, which adds up to several times ``spike``.
        memory: coefficient of a first-order autoregression on the white part.
        tail_process: process effects from Student's t with 3 degrees of freedom and not from a normal.
    """

    name: str
    white: float = 0.004
    process: float = 0.0
    drift: float = 0.0
    jump: float = 0.0
    stay: float = 0.98
    tail: float = 0.0
    spike: float = 0.0
    memory: float = 0.0
    tail_process: bool = False


QUIET = (
    Noise("white", process=0.001),
    Noise("drift", process=0.001, drift=0.05),
    Noise("two clocks", process=0.001, jump=0.05),
    Noise("heavy tails", process=0.001, tail=0.05, spike=0.05, tail_process=True),
    Noise("autocorrelated", process=0.001, memory=0.8),
    Noise("all at once", process=0.001, drift=0.03, jump=0.03, tail=0.03, spike=0.03, memory=0.6),
)
LOUD = (
    Noise("shared 2-core host", white=0.05, process=0.008, drift=0.1, jump=0.05, tail=0.1, spike=0.3, memory=0.7),
    Noise("noise without processes", white=0.03, tail=0.05, spike=0.2, memory=0.5),
)


def series(
    noise: Noise, effect: float, blocks: int, generator: np.random.Generator, alone: bool
) -> tuple[Array, Array]:
    """Log-ratios of one process: of the arm with ``effect`` to the baseline, and of the A/A arm to the baseline."""
    samples = blocks * 6
    white = generator.normal(0, noise.white, samples)
    if noise.memory:
        for i in range(1, samples):
            white[i] = noise.memory * white[i - 1] + math.sqrt(1 - noise.memory**2) * white[i]
    state = np.cumsum(generator.random(samples) > noise.stay) % 2
    drift = generator.normal(0, noise.drift) * np.linspace(-0.5, 0.5, samples)
    spikes = np.where(generator.random(samples) < noise.tail, generator.exponential(noise.spike or 1e-9, samples), 0.0)
    log = (white + noise.jump * state + drift + spikes).reshape(blocks, 6)
    order = np.argsort(generator.random((blocks, 3)), axis=1)
    place = np.empty_like(order)
    np.put_along_axis(place, order, np.arange(3)[None, :].repeat(blocks, 0), axis=1)
    rows = np.arange(blocks)
    # Arm k is sampled at its place on the way out and at the mirrored place on the way back.
    mean = np.stack([(log[rows, place[:, k]] + log[rows, 5 - place[:, k]]) / 2 for k in range(3)])
    own = np.zeros(2)
    if noise.process and not alone:
        own = generator.standard_t(3, 2) / math.sqrt(3) if noise.tail_process else generator.normal(0, 1, 2)
        own = own * noise.process
    return mean[0] - mean[1] + effect + own[0], mean[0] - mean[2] + own[1]


@dataclass(frozen=True)
class Outcome:
    covered: float
    false: float
    wrong: float
    resolved: float
    half_width: float


def trial(noise: Noise, effect: float, processes: int, blocks: int, repeats: int, seed: int) -> Outcome:
    """``repeats`` synthetic runs. ``false`` counts FASTER or SLOWER, ``wrong`` those in the wrong direction."""
    generator = np.random.default_rng(seed)
    covered = false = wrong = resolved = 0
    widths = []
    for _ in range(repeats):
        pairs = [series(noise, effect, blocks, generator, processes == 1) for _ in range(processes)]
        found = statistics.interval([p[0] for p in pairs])
        twin = statistics.interval([p[1] for p in pairs])
        assert found is not None
        covered += found.low <= effect <= found.high
        said = statistics.verdict(found, noise=twin)
        false += said in ("FASTER", "SLOWER")
        wrong += (said == "FASTER" and effect <= 0) or (said == "SLOWER" and effect >= 0)
        resolved += said != "UNRESOLVED"
        widths.append((found.high - found.low) / 2)
    return Outcome(covered / repeats, false / repeats, wrong / repeats, resolved / repeats, float(np.median(widths)))


def stopped_trial(noise: Noise, effect: float, repeats: int, seed: int, most: int = 128) -> Outcome:
    """As a run in one process does it: a look now and then, and the end where the verdict stands."""
    generator = np.random.default_rng(seed)
    covered = false = wrong = resolved = 0
    widths = []
    for _ in range(repeats):
        arm, twin = series(noise, effect, most, generator, True)
        count = next(
            (
                n
                for n in range(statistics.FIRST_LOOK, most, statistics.NEXT_LOOK)
                if statistics.decided(statistics.interval([arm[:n]]))
            ),
            most,
        )
        found = statistics.interval([arm[:count]])
        floor = statistics.interval([twin[:count]])
        assert found is not None
        covered += found.low <= effect <= found.high
        said = statistics.verdict(found, noise=floor)
        false += said in ("FASTER", "SLOWER")
        wrong += (said == "FASTER" and effect <= 0) or (said == "SLOWER" and effect >= 0)
        resolved += said != "UNRESOLVED"
        widths.append((found.high - found.low) / 2)
    return Outcome(covered / repeats, false / repeats, wrong / repeats, resolved / repeats, float(np.median(widths)))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=2000)
    options = parser.parse_args(arguments)
    print(f"{'noise':<26}{'processes x blocks':>20}{'effect':>8}{'covered':>9}{'verdict':>9}{'wrong':>8}{'+-':>9}")
    pooled: list[float] = []
    quiet: list[float] = []
    for index, noise in enumerate((*QUIET, *LOUD)):
        for processes, blocks in ((5, 24), (8, 16), (1, 64)):
            for effect in (0.0, 0.01):
                seed = 1000 * index + 10 * processes + round(effect * 100)
                got = trial(noise, effect, processes, blocks, options.repeats, seed)
                pooled.append(got.covered)
                if effect == 0:
                    quiet.append(got.false)
                print(
                    f"{noise.name:<26}{f'{processes} x {blocks}':>20}{effect:>8.1%}{got.covered:>9.1%}{got.false:>9.2%}"
                    f"{got.wrong:>8.2%}{got.half_width:>9.2%}",
                    flush=True,
                )
        for effect in (0.0, 0.01):
            got = stopped_trial(noise, effect, options.repeats, 1000 * index + 7 + round(effect * 100))
            pooled.append(got.covered)
            if effect == 0:
                quiet.append(got.false)
            print(
                f"{noise.name:<26}{'1 x 32..128, stops':>20}{effect:>8.1%}{got.covered:>9.1%}{got.false:>9.2%}"
                f"{got.wrong:>8.2%}{got.half_width:>9.2%}",
                flush=True,
            )
    print(
        f"coverage {np.mean(pooled):.1%} over all, from {min(pooled):.1%} to {max(pooled):.1%}; "
        f"FASTER or SLOWER without an effect {np.mean(quiet):.2%} over all, at most {max(quiet):.2%}"
    )


if __name__ == "__main__":
    main()
