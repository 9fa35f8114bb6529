"""Decisions from given times: no clock runs here."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from opgraft.compile import timing
from opgraft.compile.measure import both_ways, decide


class Clock:
    """A clock that only the timed functions move, with a drift that hits both."""

    def __init__(self, noise: float = 0.0, seed: int = 0) -> None:
        self.now = 0.0
        self.noise = noise
        self.random = random.Random(seed)

    def __call__(self) -> float:
        return self.now

    def task(self, seconds: float):  # type: ignore[no-untyped-def]
        def run() -> None:
            self.now += seconds * (1.0 + self.noise * self.random.uniform(-1.0, 1.0))

        return run


def times(compiler: float, kernel: float, noise: float = 0.0, seed: int = 0, monkeypatch=None) -> timing.Samples:  # type: ignore[no-untyped-def]
    clock = Clock(noise, seed)
    monkeypatch.setattr(timing, "clock", clock)
    return timing.interleave(clock.task(compiler), clock.task(kernel), seconds=0.5)


def test_the_faster_kernel_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    decision = decide(times(2e-4, 1e-4, 0.05, monkeypatch=monkeypatch), where="")
    assert decision.choice == "kernel"
    assert decision.ratio == pytest.approx(2.0, rel=0.02)
    assert decision.compiler_us == pytest.approx(200, rel=0.05)


def test_the_faster_compiler_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    decision = decide(times(1e-4, 2e-4, 0.05, monkeypatch=monkeypatch), where="")
    assert decision.choice == "compiler"
    assert "2.0" in decision.why


@pytest.mark.parametrize("seed", range(20))
def test_a_tie_is_the_compilers(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert decide(times(1e-4, 1e-4, 0.3, seed, monkeypatch), where="").choice == "compiler"


def test_a_gain_within_the_noise_is_a_tie(monkeypatch: pytest.MonkeyPatch) -> None:
    assert decide(times(1.01e-4, 1e-4, monkeypatch=monkeypatch), where="").choice == "compiler"


def test_timing_ends_when_its_time_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(timing, "clock", clock)
    timing.interleave(clock.task(0.5), clock.task(0.5), seconds=0.1)
    assert clock.now < 0.5 * (4 + 4 * 10)


def test_blocks_have_a_clock_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """What another process takes of the core passes on the wall's clock alone."""
    wall, busy = Clock(), Clock()
    monkeypatch.setattr(timing, "clock", wall)

    def candidate(seconds: float, taken: float) -> Callable[[], None]:
        def run() -> None:
            wall.now += seconds + taken
            busy.now += seconds

        return run

    samples = timing.interleave(candidate(2e-3, 0.0), candidate(1e-3, 5e-3), seconds=0.5, tick=busy)
    assert timing.judge(samples).ratio == pytest.approx(2.0)


def test_the_interval_is_that_of_the_median() -> None:
    """Of nine pairs the second smallest and the second largest bound the median with 96.1 %."""
    rounds = tuple((1.0 + 0.1 * i, 1.0, 1.0, 1.0 + 0.1 * i) for i in range(9))
    assert timing.judge(timing.Samples(rounds)).interval == pytest.approx((1.1, 1.7))


def test_on_a_gpu_a_kernel_that_loses_on_the_device_or_on_the_host_is_an_open_case(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    faster = times(2e-4, 1e-4, monkeypatch=monkeypatch)
    slower = times(1e-4, 2e-4, monkeypatch=monkeypatch)
    same = times(1e-4, 1e-4, monkeypatch=monkeypatch)
    for called, replayed in ((faster, faster), (same, faster), (faster, same)):
        found = both_ways(called, replayed)
        assert (found.choice, found.open) == ("kernel", False)
    for called, replayed in ((slower, faster), (faster, slower)):
        found = both_ways(called, replayed)
        assert (found.choice, found.open) == ("kernel", True)
    assert both_ways(same, same).choice == "compiler"
    assert both_ways(slower, same).choice == "compiler"
