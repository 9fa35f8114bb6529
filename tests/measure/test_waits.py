"""The ledger explains steps whose host and device are known to the microsecond: those of a simulated pair of queues."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import pytest

sys.path.insert(0, str(Path(__file__).parent))
from two_queues import Launch, Machine, facts, timed

from opgraft.diagnostics.measure import apart, clock, ledger, prediction, prose
from opgraft.diagnostics.measure.facts import ArmFacts, FactsReading, NodeFact
from opgraft.diagnostics.measure.prices import Prices

CALLS = 8
# Host and kernel microseconds of a part of a layer.
SIZES = {"host-bound": (9.0, 3.0), "gpu-bound": (9.0, 90.0), "near": (9.0, 8.6), "op tips it": (9.0, 10.5)}
OP_HOST, REFERENCE, ALONE = 11.0, 4.0, 3.5


def layers(host: float, kernel: float, with_op: bool) -> list[Launch]:
    matmul = Launch(host, 1.4 * kernel, "library")
    if not with_op:
        return [Launch(host, kernel), matmul, Launch(host, kernel + REFERENCE), matmul] * CALLS
    around = [Launch(host, kernel), Launch(OP_HOST, ALONE, "op"), Launch(host, kernel)]
    return [Launch(host, kernel), matmul, *around, matmul] * CALLS


def backward(host: float, kernel: float) -> list[Launch]:
    """A second half of the step that the device is slow at, whatever the first was."""
    return [Launch(host, 30.0 * kernel, "library")] * (4 * CALLS)


def reading(base: ArmFacts, own: ArmFacts, kernel: float) -> FactsReading:
    return FactsReading(
        arms=(base, own),
        reference=ArmFacts(name="reference"),
        alone_us={"op": ALONE * CALLS, "compiler": (kernel + REFERENCE) * CALLS},
        copy_bytes_per_second=4e12,
        calls=CALLS,
        host_us_of_calls=OP_HOST * CALLS,
    )


@pytest.mark.parametrize("mixed", [False, True], ids=["forward", "mixed"])
@pytest.mark.parametrize("jitter", [0.0, 0.5])
@pytest.mark.parametrize("size", SIZES)
def test_little_of_a_step_stays_unexplained_wherever_host_and_device_wait(
    size: str, jitter: float, mixed: bool
) -> None:
    host, kernel = SIZES[size]
    machine = Machine(jitter=jitter)
    rest = backward(host, kernel) if mixed else []
    base, base_us = facts("compiler", [*layers(host, kernel, False), *rest], machine)
    own, own_us = facts("op", [*layers(host, kernel, True), *rest], machine)
    found = ledger.make("op", reading(base, own, kernel), base_us, own_us, on_gpu=True)
    assert found is not None
    assert found.unexplained_share is not None
    assert found.unexplained_share < 0.01
    assert sum(t.us_per_step or 0.0 for t in found.terms) == pytest.approx(own_us - base_us)


def test_where_both_arms_wait_for_the_host_kernels_are_said_to_be_hidden() -> None:
    base, base_us = facts("compiler", layers(9.0, 3.0, False), Machine())
    own, own_us = facts("op", layers(9.0, 3.0, True), Machine())
    found = ledger.make("op", reading(base, own, 3.0), base_us, own_us, on_gpu=True)
    assert found is not None
    terms = {t.name: t.us_per_step or 0.0 for t in found.terms}
    assert terms[ledger.HOST] == pytest.approx(CALLS * (OP_HOST + 9.0), rel=1e-3)
    assert terms[ledger.HIDDEN] == pytest.approx(-(own.queued_us - base.queued_us))
    (said,) = prose.reasons(found)
    assert "waits for the host" in said
    assert "+16 launches" in said


def test_where_the_device_is_waited_for_the_host_is_no_term() -> None:
    base, base_us = facts("compiler", layers(9.0, 90.0, False), Machine())
    own, own_us = facts("op", layers(9.0, 90.0, True), Machine())
    found = ledger.make("op", reading(base, own, 90.0), base_us, own_us, on_gpu=True)
    assert found is not None
    terms = {t.name: t.us_per_step or 0.0 for t in found.terms}
    assert ledger.HOST not in terms
    assert terms[ledger.GAPS] == pytest.approx(2 * CALLS * 0.9)


def test_a_host_held_up_by_a_full_queue_is_no_slow_host() -> None:
    step = layers(9.0, 9.0, True)
    _, issued = timed(step, 100, Machine(room=60))
    full, took = facts("op", step, Machine(room=60))
    assert issued[-1][1] / 100 > sum(x.host for x in step)
    waits = ledger.waits(full, took, True)
    assert not waits.bound
    assert waits.host < 0.01 * took


def test_a_step_that_cannot_be_issued_ahead_is_read_from_the_records() -> None:
    waiting = ArmFacts(name="op", generated_us=100, span_us=160, enqueue_us=400, step_us=400)
    busy = ArmFacts(name="op", generated_us=380, span_us=390, enqueue_us=300, step_us=400)
    assert ledger.waits(waiting, 400, True) == ledger.Waits(0.0, 300.0, True)
    assert ledger.waits(busy, 400, True) == ledger.Waits(10.0, 0.0, False)


@pytest.mark.parametrize("size", SIZES)
def test_the_step_is_foretold_from_the_base_and_the_parts_alone(size: str) -> None:
    host, kernel = SIZES[size]
    machine = Machine()
    base, base_us = facts("compiler", layers(host, kernel, False), machine)
    _, own_us = facts("op", layers(host, kernel, True), machine)
    moved, nodes = 1_000_000, {"generated": 1_000_000, "library": 0, "op": 0}

    def graph(arm: list[Launch]) -> tuple[NodeFact, ...]:
        return tuple(NodeFact(graph=0, kind=x.sort, name="", bytes=nodes[x.sort]) for x in arm)  # type: ignore[arg-type]

    known = FactsReading(
        arms=(),
        reference=ArmFacts(name="reference", nodes=graph([Launch(host, kernel)] * CALLS), runs=(1.0,)),
        alone_us={"op": ALONE * CALLS, "compiler": (kernel + REFERENCE) * CALLS},
        prices=Prices(((1000.0, kernel), (2.0 * moved, kernel))),
        # An op takes the place of one generated kernel and parts two.
        host_us_of_calls=(OP_HOST + host) * CALLS,
    )
    compiler = msgspec.structs.replace(base, nodes=graph(layers(host, kernel, False)), runs=(1.0,))
    own = ArmFacts(name="op", nodes=graph(layers(host, kernel, True)), runs=(1.0,))
    foretold = prediction.step_us(base_us, compiler, own, known, on_gpu=True)
    assert foretold == pytest.approx(own_us, rel=0.02)


def test_kernels_of_a_replayed_graph_cost_the_host_nothing() -> None:
    base = ArmFacts(
        name="compiler", generated_us=200, span_us=220, enqueue_us=90, step_us=215, queued_us=214, host_share=0.5,
        kernels={"generated": 40.0}, launches=1.0, replays=1.0,
    )  # fmt: skip
    own = ArmFacts(name="op", nodes=tuple(NodeFact(graph=0, kind="op", name="", bytes=1) for _ in range(30)), runs=(1,))
    known = FactsReading(
        alone_us={"op": 0.0, "compiler": 0.0},
        host_us_of_calls=900.0,
    )
    gap = (214 - 200) / 40
    assert prediction.step_us(215, base, own, known, on_gpu=True) == pytest.approx(215 + 30 * gap)


def test_prices_lie_between_what_was_measured() -> None:
    prices = Prices(((100.0, 2.0), (1000.0, 11.0), (2000.0, 21.0)))
    assert [prices.us(size) for size in (0, 1, 100, 550, 1500, 4000)] == pytest.approx([0, 2, 2, 6.5, 16, 42])
    assert Prices().us(10.0) == 0.0


def test_times_of_several_processes_are_joined_beside_the_compilers_counts() -> None:
    nodes = (NodeFact(graph=0, kind="op", name="", bytes=7),)
    counted = FactsReading(arms=(ArmFacts(name="op", nodes=nodes), ArmFacts(name="compiler", failed="no room")))
    takes = [[ArmFacts(name="op", queued_us=us, kernels={"op": 8.0})] for us in (10.0, 12.0, 30.0)]
    joined = apart.with_times(counted, takes).arm("op")
    assert joined is not None
    assert (joined.queued_us, joined.nodes, joined.kernels) == (12.0, nodes, {"op": 8.0})
    assert apart.with_times(counted, [[]]) == counted


def test_host_costs_are_brought_to_the_speed_that_the_host_had_when_steps_were_timed() -> None:
    base = ArmFacts(
        name="compiler", generated_us=100, enqueue_us=600, step_us=600, queued_us=110, host_share=1.0,
        kernels={"generated": 10.0}, launches=10.0,
    )  # fmt: skip
    own = ArmFacts(name="op", nodes=(NodeFact(graph=0, kind="op", name="", bytes=1),), runs=(8.0,))
    known = FactsReading(alone_us={"op": 0.0, "compiler": 0.0}, host_us_of_calls=8 * 20.0, host_us_of_step=300.0)
    assert prediction.step_us(600, base, own, known, on_gpu=True) == pytest.approx(600 + 8 * 20 * 2)


def test_a_step_ends_when_it_was_issued_and_the_device_is_through_with_it() -> None:
    issued = ((1, 30.0), (2, 32.0), (4, 40.0))
    assert clock.paced(issued, 1.0) == 10.0  # the host alone
    assert clock.paced(issued, 10.0) == (30 + 3 * 10) / 4  # one slow start, then the device
    assert clock.paced((), 1.0) == 0.0
