"""The ledger adds up, names its largest term, and its bounds follow their closed forms."""

from __future__ import annotations

import pytest

from opgraft.diagnostics.measure import ledger, prediction, prose
from opgraft.diagnostics.measure.facts import ArmFacts, FactsReading, NodeFact
from opgraft.diagnostics.model import ArmResult, Comparison

MB = 1_000_000


def node(kind: str, megabytes: int, role: str = "") -> NodeFact:
    return NodeFact(graph=0, kind=kind, name=kind, bytes=megabytes * MB, role=role)  # type: ignore[arg-type]


# The chapter's case in round figures: eight sites, one fused kernel each, or scale, op, scale.
COMPILER = ArmFacts(
    name="compiler", nodes=(node("generated", 4000), node("library", 9000)), runs=(1.0,), generated_us=2500,
    library_us=4700, span_us=7290, enqueue_us=900, step_us=7300, kernels={"generated": 8.0, "op": 0.0, "library": 16.0},
)  # fmt: skip
OP = ArmFacts(
    name="op", nodes=(node("generated", 4300), node("op", 4000), node("library", 9000)), runs=(1.0,), generated_us=1040,
    op_us=2150, library_us=4705, span_us=7990, enqueue_us=1000, step_us=8000,
    kernels={"generated": 16.0, "op": 8.0, "library": 16.0},
)  # fmt: skip
REFERENCE = ArmFacts(name="reference", nodes=(node("generated", 4000),), runs=(1.0,))
FACTS = FactsReading(
    arms=(COMPILER, OP),
    reference=REFERENCE,
    alone_us={"op": 2056, "compiler": 2496},
    copy_bytes_per_second=4e12,
    calls=8,
)


def test_the_terms_add_up_to_the_measured_difference() -> None:
    found = ledger.make("op", FACTS, 7300, 8000, on_gpu=True)
    assert found is not None
    assert sum(t.us_per_step or 0 for t in found.terms) == pytest.approx(700)
    assert found.total_us == 700


def test_lost_fusion_is_the_largest_term_of_the_chapters_case() -> None:
    found = ledger.make("op", FACTS, 7300, 8000, on_gpu=True)
    assert found is not None
    terms = {t.name: t for t in found.terms}
    assert max(terms.values(), key=lambda t: abs(t.us_per_step or 0)).name == "lost fusion"
    assert terms["kernel alone"].us_per_step == pytest.approx(2056 - 2496)
    assert terms["lost fusion"].us_per_step == pytest.approx(1040 - 2500 + 2496)
    assert terms["lost fusion"].bytes_per_step == 4300 * MB
    assert terms["lost fusion"].launches_per_step == 16
    assert found.unexplained_share == pytest.approx(abs(terms["unexplained"].us_per_step or 0) / 7300)


def test_copies_are_taken_out_of_lost_fusion_and_priced() -> None:
    copying = ArmFacts(**{**_fields(OP), "nodes": (*OP.nodes, node("generated", 800, "layout copy"))})
    facts = FactsReading(**{**_fields(FACTS), "arms": (COMPILER, copying)})
    found = ledger.make("op", facts, 7300, 8000, on_gpu=True)
    assert found is not None
    terms = {t.name: t for t in found.terms}
    assert terms["layout copies"].us_per_step == pytest.approx(800 * MB / 4e12 * 1e6)
    assert terms["layout copies"].how == "counted"
    assert terms["lost fusion"].bytes_per_step == 4300 * MB
    assert sum(t.us_per_step or 0 for t in found.terms) == pytest.approx(700)


def _fields(struct: object) -> dict[str, object]:
    return {name: getattr(struct, name) for name in struct.__struct_fields__}  # type: ignore[attr-defined]


def test_facts_of_a_slower_process_are_brought_to_the_speed_of_the_timed_steps() -> None:
    slow = FactsReading(
        **{
            **_fields(FACTS),
            "arms": (COMPILER.scaled(2), OP.scaled(2)),
            "alone_us": {k: 2 * v for k, v in FACTS.alone_us.items()},
        }
    )
    once, twice = (ledger.make("op", f, 7300, 8000, on_gpu=False) for f in (FACTS, slow))
    assert once is not None
    assert twice is not None
    assert [t.us_per_step for t in twice.terms] == pytest.approx([t.us_per_step for t in once.terms])


@pytest.mark.parametrize(("share", "speedup", "bound"), [(0.5, 2.0, 4 / 3), (0.0, 9.0, 1.0), (1.0, 3.0, 3.0)])
def test_amdahl(share: float, speedup: float, bound: float) -> None:
    assert ledger.amdahl(share, speedup) == pytest.approx(bound)


def test_an_arm_without_facts_has_no_ledger() -> None:
    assert ledger.make("raw", FACTS, 7300, 8000, on_gpu=True) is None


def test_the_prediction_uses_the_graph_and_not_the_times_of_the_op_arm() -> None:
    foretold = prediction.step_us(7300, COMPILER, OP, FACTS, on_gpu=True)
    gap = (7290 - 7200) / 24
    assert foretold == pytest.approx(7300 + (2056 - 2496) + 4300 * MB / 4e12 * 1e6 + gap)
    slower = OP.scaled(3)
    assert prediction.step_us(7300, COMPILER, slower, FACTS, on_gpu=True) == foretold


def test_the_paragraph_says_effect_cause_and_advice() -> None:
    made = ledger.make("op", FACTS, 7300, 8000, on_gpu=True)
    assert made is not None
    arms = (
        ArmResult(name="compiler", isolated_us=312, step_us=7300),
        ArmResult(
            name="op",
            isolated_us=257,
            step_us=8000,
            ratio=0.9125,
            ratio_low=0.91,
            ratio_high=0.915,
            verdict="SLOWER",
        ),
    )
    said = prose.paragraph(Comparison(arms=arms, ops=("ns::gelu",), ledgers=(made,)), 8, [])
    assert "1.21x faster alone, 8 calls a step but makes the step 9.6% slower" in said
    assert said.index("saves 440 us") < said.index("you now move 4.3 GB more in 16 more launches")
    assert said.endswith("Fuse the neighbours into the kernel, or leave this site to the compiler.")


def test_an_op_of_torchs_own_kernels_is_not_counted_twice_on_a_gpu() -> None:
    merged = ArmFacts(**{**_fields(OP), "op_us": 0.0, "library_us": 4705 + 2150})
    found = ledger.make("op", FactsReading(**{**_fields(FACTS), "arms": (COMPILER, merged)}), 7300, 8000, on_gpu=True)
    assert found is not None
    terms = {t.name: t.us_per_step for t in found.terms}
    assert terms["other kernels"] == pytest.approx(4705 + 2150 - 2056 - 4700)
    assert sum(v or 0 for v in terms.values()) == pytest.approx(700)
