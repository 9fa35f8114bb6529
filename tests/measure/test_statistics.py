"""The interval covers, the verdict keeps quiet, and several claims are held to the error of one."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from opgraft.diagnostics.measure import statistics

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
import coverage as synthetic  # benchmarks/coverage.py, not the package

NOISES = {noise.name: noise for noise in (*synthetic.QUIET, *synthetic.LOUD)}


@pytest.mark.parametrize("name", NOISES)
@pytest.mark.parametrize(("processes", "blocks"), [(5, 24), (1, 64)])
def test_the_interval_covers_a_known_effect(name: str, processes: int, blocks: int) -> None:
    found = synthetic.trial(NOISES[name], 0.01, processes, blocks, repeats=400, seed=11)
    # 95 % of 400 has a standard error of 1.1 %: four of them.
    assert 0.906 <= found.covered <= 0.994
    assert found.wrong <= 0.005


@pytest.mark.parametrize("name", NOISES)
def test_a_program_against_itself_is_neither_faster_nor_slower(name: str) -> None:
    false = [synthetic.trial(NOISES[name], 0.0, p, b, repeats=300, seed=3).false for p, b in ((5, 16), (1, 48))]
    assert np.mean(false) <= 0.01


def test_stopping_early_keeps_the_promise() -> None:
    found = synthetic.stopped_trial(NOISES["noise without processes"], 0.0, repeats=300, seed=5, most=96)
    assert found.false <= 0.015
    assert 0.90 <= found.covered <= 0.99


def test_one_process_of_independent_blocks_agrees_with_students_t_on_batches() -> None:
    blocks = np.random.default_rng(0).normal(0.02, 0.01, 64)
    found = statistics.interval([blocks.tolist()])
    assert found is not None
    centres = [statistics.location(batch) for batch in np.array_split(blocks, 8)]
    low, high = stats.t.interval(0.95, 7, np.mean(centres), stats.sem(centres))
    assert found.low == pytest.approx(low)
    assert found.high == pytest.approx(high)


def test_the_closed_form_is_the_two_level_bootstrap() -> None:
    generator = np.random.default_rng(1)
    groups = [generator.normal(generator.normal(0, 0.01), 0.004, 20) for _ in range(6)]
    found = statistics.interval([g.tolist() for g in groups])
    assert found is not None
    drawn = statistics.bootstrap(groups, generator, 20_000).var()
    within = sum(statistics.location(g[generator.integers(0, 20, (4000, 20))]).var() for g in groups) / 36
    assert (drawn - within) * 6 / 5 == pytest.approx(found.se**2, rel=0.08)


def test_a_process_effect_widens_the_interval() -> None:
    generator = np.random.default_rng(2)
    noise = generator.normal(0, 0.001, (5, 20))
    alike = statistics.interval(noise.tolist())
    apart = statistics.interval((noise + generator.normal(0, 0.02, (5, 1))).tolist())
    assert alike is not None
    assert apart is not None
    assert apart.se > 5 * alike.se


def test_holm_against_a_published_example() -> None:
    # Holm 1979 as worked through in R's p.adjust: sorted p times (n - rank), running maximum.
    adjusted = statistics.holm({"a": 0.01, "b": 0.02, "c": 0.03, "d": 0.04})
    assert adjusted == pytest.approx({"a": 0.04, "b": 0.06, "c": 0.06, "d": 0.06})


@pytest.mark.parametrize(
    ("effect", "spread", "said"),
    [(0.1, 0.001, "FASTER"), (-0.1, 0.001, "SLOWER"), (0.0, 0.001, "EQUIVALENT"), (0.01, 0.2, "UNRESOLVED")],
)
def test_verdicts(effect: float, spread: float, said: str) -> None:
    ratios = np.random.default_rng(4).normal(effect, spread, (5, 20)).tolist()
    found = statistics.interval(ratios)
    assert found is not None
    assert statistics.verdict(found) == said


def test_an_effect_below_the_noise_floor_of_the_run_is_not_claimed() -> None:
    generator = np.random.default_rng(5)
    found = statistics.interval(generator.normal(0.02, 0.001, (5, 20)).tolist())
    noise = statistics.interval(generator.normal(0.03, 0.001, (5, 20)).tolist())
    assert found is not None
    assert statistics.verdict(found, noise=noise) == "UNRESOLVED"


def test_too_little_data_gives_no_interval() -> None:
    assert statistics.interval([[0.1]]) is None
    assert statistics.interval([]) is None


def test_a_steps_time_comes_with_its_interval() -> None:
    logs = np.log(1e-3) + np.random.default_rng(6).normal(0, 0.01, (5, 30))
    found = statistics.level(logs.tolist())
    assert found is not None
    assert found[1] < found[0] < found[2]
    assert math.exp(found[0]) == pytest.approx(1e-3, rel=0.01)
