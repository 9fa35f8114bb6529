"""A step is found in a series of graph calls: with and without entries, with warm-up, with repeats inside the step."""

from __future__ import annotations

import pytest

from opgraft.diagnostics.collect.laps import ENTRY, Call, find_period, summarise
from opgraft.diagnostics.diagnose.cost import median_interval


def series(names: str) -> list[Call]:
    """One call a letter, ``|`` is an entry; a graph runs 5 us and the next call comes 10 us after it began."""
    return [
        (ENTRY if name == "|" else f"{ord(name) - ord('a')}/0", 10_000 * i, 10_000 * i + (0 if name == "|" else 5_000))
        for i, name in enumerate(names)
    ]


@pytest.mark.parametrize(
    ("names", "step", "repeats"),
    [
        ("ab" * 5, "ab", 5),
        ("xyz" + "abc" * 6, "abc", 6),
        ("abbb" * 5, "abbb", 5),
        ("|abab" * 4, "abab", 4),
        ("|ab|c" * 4, "abc", 4),
        ("ba" * 5, "ab", 4),
    ],
)
def test_the_step(names: str, step: str, repeats: int) -> None:
    laps = summarise(series(names))
    assert laps.graphs == tuple(f"{ord(name) - ord('a')}/0" for name in step)
    assert laps.steps == repeats
    assert all(us == 5.0 for times in laps.us for us in times)


def test_nothing_repeats() -> None:
    assert find_period(list("abcdef")) == 0
    assert summarise(series("abcdef")).steps == 0
    assert summarise([]).steps == 0


def test_what_ran_before_the_last_compile_does_not_count() -> None:
    calls = series("|ab" * 8)
    assert summarise(calls, [(0, 10_000 * 12)]).steps == 4


def test_gaps_and_whole_steps() -> None:
    laps = summarise(series("|ab" * 8))
    assert set(laps.gap_us[0]) == {5.0}
    assert set(laps.step_us) == {30.0}


def test_the_interval_of_a_median_holds_for_any_distribution() -> None:
    assert median_interval([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]) == (1.0, 6.0)
    low, high = median_interval([float(i) for i in range(100)])
    assert (low, high) == (39.0, 60.0)  # ranks 40 and 61, as tables of the sign test give them
