"""What the three clocks read of real arms on an H200: the ledger explains their steps, host-bound, device-bound, mixed.

``recorded/h200_steps.json`` holds, for every arm, kernel times by who wrote them, the step on the device alone, and
timed samples: microseconds a step by events, and how far the host was when.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import pytest

from opgraft.diagnostics.measure import clock, ledger
from opgraft.diagnostics.measure.facts import ArmFacts, FactsReading

CASES = json.loads((Path(__file__).parent / "recorded" / "h200_steps.json").read_text())["cases"]
ARMS = [(case, arm) for case in CASES for arm in case["arms"]]


def title(value: Any) -> str:
    return f"{value['case']} {value['mode'] or 'default'}" if isinstance(value, dict) else value


def median(values: list[float]) -> float:
    return statistics.median(values)


def facts(case: dict[str, Any], name: str) -> tuple[ArmFacts, float]:
    arm = case["arms"][name]
    took = median([us for us, _ in arm["samples"]])
    return (
        ArmFacts(
            name=name,
            **{f"{sort}_us": us for sort, us in arm["kernels_us"].items()},
            enqueue_us=arm["enqueue_us"],
            step_us=took,
            queued_us=arm["queued_us"],
            host_share=median([issued[-1][1] / issued[-1][0] / us for us, issued in arm["samples"]]),
            paced_share=median([clock.paced(issued, arm["queued_us"]) / us for us, issued in arm["samples"]]),
            kernels={sort: float(n) for sort, n in arm["kernels"].items()},
        ),
        took,
    )


def made(case: dict[str, Any]) -> ledger.Ledger:
    (base, base_us), (own, own_us) = facts(case, "compiler"), facts(case, "op")
    reading = FactsReading(
        arms=(base, own),
        reference=ArmFacts(name="reference"),
        alone_us=case["alone"],
        copy_bytes_per_second=4.18e12,
        calls=case["sites"],
    )
    found = ledger.make("op", reading, base_us, own_us, on_gpu=True)
    assert found is not None
    return found


@pytest.mark.parametrize(("case", "arm"), ARMS, ids=title)
def test_host_and_device_together_give_the_step_that_events_measured(case: dict[str, Any], arm: str) -> None:
    found, _ = facts(case, arm)
    assert found.paced_share == pytest.approx(1.0, abs=0.01)


@pytest.mark.parametrize("case", CASES, ids=title)
def test_little_of_a_real_step_stays_unexplained(case: dict[str, Any]) -> None:
    found = made(case)
    assert found.unexplained_share is not None
    assert found.unexplained_share < 0.01


def test_what_sets_the_pace_is_told() -> None:
    said = {title(case): {t.name: t for t in made(case).terms} for case in CASES}
    assert {name for name, terms in said.items() if ledger.HIDDEN in terms} == {"mlp_tiny default", "mlp_small default"}
    # Replayed, nothing waits for the host; the op's launches tip one arm over that was bound by the device before.
    replayed = said["mlp_tiny reduce-overhead"].get(ledger.HOST)
    assert replayed is None or abs(replayed.us_per_step or 0.0) < 0.01 * 167
    assert said["llama_norms default"][ledger.HOST].detail.startswith("host-bound (op)")
