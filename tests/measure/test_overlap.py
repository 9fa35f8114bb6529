"""Kernels that overlap on the device: their times add up to what the device was busy."""

from __future__ import annotations

import itertools
import random

from opgraft.diagnostics.measure.profile import Record, busy_us, without_overlap


def _times(records: list[Record]) -> dict[str, float]:
    return {r.name: r.duration for r in records}


def test_a_kernel_that_waits_for_the_one_before_it_does_not_run_yet() -> None:
    # As launched with programmatic stream serialisation: the sum begins with the loss and waits for its end.
    found = without_overlap([Record("loss", "kernel", 0.0, 500.0), Record("sum", "kernel", 3.0, 500.0)])
    assert _times(found) == {"loss": 500.0, "sum": 3.0}
    assert [(r.start, r.end) for r in found] == [(0.0, 500.0), (500.0, 503.0)]


def test_what_lies_within_another_takes_nothing() -> None:
    found = without_overlap([Record("long", "kernel", 0.0, 10.0), Record("short", "copy", 2.0, 3.0)])
    assert _times(found) == {"long": 10.0, "short": 0.0}


def test_the_host_is_left_as_it_is() -> None:
    host = [Record("aten::mm", "host", 0.0, 10.0), Record("aten::mul", "host", 2.0, 3.0)]
    assert without_overlap(host) == host


def test_times_add_up_to_what_the_device_was_busy() -> None:
    draw = random.Random(0)
    for _ in range(50):
        records = [Record(str(i), "kernel", draw.uniform(0, 100), draw.uniform(0, 20)) for i in range(30)]
        found = without_overlap(records)
        assert abs(sum(r.duration for r in found) - busy_us(records)) < 1e-9
        assert all(a.end <= b.start + 1e-9 for a, b in itertools.pairwise(found))
