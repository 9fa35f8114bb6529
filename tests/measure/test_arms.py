"""Arms differ at the op's call sites alone, and a comparison that means nothing says so."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, str(Path(__file__).parent))
from opgraft.diagnostics.measure import ops, session
from opgraft.diagnostics.measure.arms import make_arm, plan_arms
from opgraft.diagnostics.measure.compare import Swap, compare
from opgraft.diagnostics.measure.question import Question
from opgraft.diagnostics.measure.sites import SiteBackend
from opgraft.diagnostics.measure.subject import subject_of
from opgraft.diagnostics.model import Report

import measured

# Dynamo and AOTAutograd without code generation: the arms are what is tested here, not their speed.
FAST: dict[str, Any] = {"backend": "aot_eager"}
SQUARE = "measuretest::square"


def quick(model: Callable[..., Any], inputs: Any, wanted: Any = (SQUARE,), **options: Any) -> Report:
    torch._dynamo.reset()
    return compare(model, inputs, wanted, seconds=0.3, compile_options=FAST, ledger=False, **options)


def kinds(report: Report) -> list[str]:
    return [f.kind for f in report.findings]


def targets_seen(model: nn.Module, replaced: bool) -> list[str]:
    """The graph's operators after the exchange, as a backend gets them."""
    seen: list[str] = []

    def inner(module: torch.fx.GraphModule, inputs: Any, **_: Any) -> Any:
        for child in module.modules():
            if isinstance(child, torch.fx.GraphModule):
                seen.extend(str(n.target) for n in child.graph.nodes if n.op == "call_function")
        return module.forward

    references = {SQUARE: measured.square} if replaced else {}
    torch._dynamo.reset()
    torch.compile(model, backend=SiteBackend(inner, references))(torch.ones(4, 8, requires_grad=True))
    return seen


@pytest.mark.parametrize("replaced", [True, False])
def test_only_the_call_of_the_op_is_exchanged(replaced: bool) -> None:
    seen = targets_seen(measured.Model(), replaced)
    assert any("reference_of_measuretest__square" in t for t in seen) is replaced
    assert any("measuretest.square" in t for t in seen) is not replaced


def test_calls_inside_a_checkpointed_region_are_exchanged_too() -> None:
    class Checkpointed(measured.Model):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(super().forward, x, use_reentrant=False)

    seen = targets_seen(Checkpointed(), True)
    assert not any("measuretest.square" in t for t in seen)


@pytest.mark.parametrize("train", [False, True])
def test_arms_agree_and_the_op_runs_in_its_own_alone(train: bool) -> None:
    model, inputs = measured.build()
    subject = subject_of(model, inputs, train=train)
    question = Question(
        ops=(SQUARE,), references={SQUARE: measured.square}, compile_options=FAST, seconds=0.2, alone_seconds=0.1
    )
    reading = session.run(subject, question)
    assert reading.problems == ()
    runs = {a.name: a.op_runs.get(SQUARE) for a in reading.arms}
    assert runs["compiler"] == 0
    assert runs["op"] == 1
    assert all(a.error is not None and a.error < 1e-5 for a in reading.arms if a.name in ("op", "compiler", "eager"))


def test_the_table_has_every_arm_and_the_site_is_the_models_line() -> None:
    report = quick(*measured.build())
    assert report.ledger is not None
    assert [a.name for a in report.ledger.arms] == ["eager", "compiler", "op"]
    assert all(a.step_us for a in report.ledger.arms)
    assert report.ledger.noise_low is not None
    assert "invalid-measurement" not in kinds(report)


def test_several_ops_are_measured_alone_and_together() -> None:
    plans = {p.name: p for p in plan_arms(["a::x", "a::y"], [], [])}
    assert plans["op a::x"].replaced == {"a::y"}
    assert plans["op a::y"].replaced == {"a::x"}
    assert plans["op"].replaced == frozenset()
    assert plans["compiler"].replaced == {"a::x", "a::y"}


def test_ops_are_found_where_none_is_named() -> None:
    model, inputs = measured.build()
    assert ops.discover(subject_of(model, inputs, train=False)) == (SQUARE,)


def test_a_raw_form_is_swapped_in_and_out_again() -> None:
    namespace = type("namespace", (), {"act": staticmethod(lambda x: torch.ops.measuretest.square(x))})

    @torch.compiler.disable
    def raw(x: torch.Tensor) -> torch.Tensor:
        return x * x

    before = namespace.__dict__["act"]
    report = quick(lambda x: namespace.act(x * 2) + 1, torch.ones(4), raw=Swap(namespace, "act", raw))
    assert report.ledger is not None
    arms = {a.name: a for a in report.ledger.arms}
    assert arms["raw"].breaks == 1
    assert arms["op"].breaks == 0
    assert namespace.__dict__["act"] is before


def test_an_unregistered_function_is_taken_out_by_its_reference() -> None:
    @torch.compiler.disable
    def kernel(x: torch.Tensor) -> torch.Tensor:
        return x * x

    namespace = type("namespace", (), {"act": staticmethod(kernel)})
    report = quick(lambda x: namespace.act(x + 1) + 1, torch.ones(4), [Swap(namespace, "act", measured.square)])
    assert report.ledger is not None
    arms = {a.name: a for a in report.ledger.arms}
    assert (arms["raw"].breaks, arms["compiler"].breaks) == (1, 0)


def test_a_wrong_kernel_gets_no_verdict() -> None:
    report = quick(measured.Model(torch.ops.measuretest.wrong), torch.ones(4, 8), ["measuretest::wrong"])
    assert "invalid-measurement" in kinds(report)
    assert report.ledger is not None
    assert {a.name: a.verdict for a in report.ledger.arms}["op"] is None
    assert report.ledger.sentence.startswith("No verdict: the arm")


class Forgetful(nn.Module):
    """Another result every time, whatever the seed."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    @torch.compiler.disable
    def noise(self) -> float:
        self.calls += 1
        return float(self.calls)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.measuretest.square(x) * self.noise()


def mutating(x: torch.Tensor) -> torch.Tensor:
    x.add_(1)
    return torch.ops.measuretest.square(x)


def valueless(x: torch.Tensor) -> str:
    torch.ops.measuretest.square(x)
    return "done"


@pytest.mark.parametrize(
    ("model", "words"),
    [(Forgetful(), "another result"), (mutating, "writes into its inputs"), (valueless, "returns no tensor")],
    ids=["not deterministic", "mutates", "no tensor"],
)
def test_a_model_that_cannot_be_compared_is_a_finding(model: Any, words: str) -> None:
    report = quick(model, torch.ones(4))
    assert any(f.kind == "invalid-measurement" and words in f.message for f in report.findings)
    assert report.ledger is not None
    assert all(a.verdict is None for a in report.ledger.arms)


def test_an_arm_that_fails_leaves_the_others_their_results() -> None:
    namespace = type("namespace", (), {"act": staticmethod(lambda x: torch.ops.measuretest.square(x))})

    def broken(x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no kernel image")

    report = quick(lambda x: namespace.act(x), torch.ones(4), raw=Swap(namespace, "act", broken))
    assert report.ledger is not None
    arms = {a.name: a for a in report.ledger.arms}
    assert "no kernel image" in arms["raw"].failed
    assert arms["op"].step_us is not None
    assert any("the arm raw fails" in f.message for f in report.findings)


def test_a_call_that_the_compiler_does_not_see_is_a_finding() -> None:
    @torch.compiler.disable
    def hidden(x: torch.Tensor) -> torch.Tensor:
        return torch.ops.measuretest.square(x)

    report = quick(lambda x: hidden(x + 1) + torch.ops.measuretest.square(x), torch.ones(4))
    assert "kernel-not-run" in kinds(report)


def test_an_op_that_the_model_does_not_call_is_a_finding() -> None:
    report = quick(measured.Model(), torch.ones(4, 8), ["measuretest::wrong"])
    assert any("no compiled graph of the model calls" in f.message for f in report.findings)


def test_a_model_that_compiles_at_every_step_is_a_finding() -> None:
    class Counting(measured.Model):
        steps = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.steps += 1
            return super().forward(x) * self.steps * 0 + super().forward(x)

    torch._dynamo.reset()
    with torch._dynamo.config.patch(
        recompile_limit=10_000, accumulated_recompile_limit=100_000, automatic_dynamic_shapes=False
    ):
        report = compare(
            Counting(), torch.ones(4, 8), [SQUARE], seconds=0.3, compile_options={"backend": "eager"}, ledger=False
        )
    assert any("compiles again" in f.message for f in report.findings)


def test_running_statistics_are_left_as_they_were() -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.ops.measuretest.square(self.norm(x))

    model = Normed().train()
    report = quick(model, torch.randn(16, 8), train=True)
    assert "invalid-measurement" not in kinds(report)


@pytest.mark.parametrize(
    ("wanted", "error", "words"),
    [
        ("nowhere::op", LookupError, "no op nowhere::op"),
        (3, TypeError, "neither an op nor the name of one"),
        ("aten::sin", LookupError, "no reference"),
    ],
)
def test_a_wrong_name_is_one_clear_sentence(wanted: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        compare(measured.Model(), torch.ones(4, 8), [wanted])


def test_a_backward_that_is_wrong_is_seen_in_training() -> None:
    library = torch.library.Library("measuretest", "FRAGMENT")
    library.define("halfgrad(Tensor x) -> Tensor")
    library.impl("halfgrad", lambda x: x * x, "CPU")
    torch.library.register_fake("measuretest::halfgrad", torch.empty_like, lib=library)
    torch.library.register_autograd(
        "measuretest::halfgrad",
        lambda ctx, grad: grad * ctx.saved_tensors[0],
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),
        lib=library,
    )
    report = quick(
        measured.Model(torch.ops.measuretest.halfgrad),
        torch.ones(4, 8),
        ["measuretest::halfgrad"],
        references={"measuretest::halfgrad": measured.square},
        train=True,
    )
    assert any("gradient of" in f.message for f in report.findings)


def test_the_arms_entry_keeps_code_of_its_own() -> None:
    model, inputs = measured.build()
    subject = subject_of(model, inputs, train=False)
    plans = plan_arms([SQUARE], [], [])
    arms = [make_arm(p, subject, {SQUARE: measured.square}, FAST) for p in plans]
    codes = {id(a.entry.__code__) for a in arms if a.entry is not None and hasattr(a.entry, "__code__")}
    assert len(codes) >= 1
    assert all(a.step is not None for a in arms)


def test_a_ledger_and_a_prediction_come_with_every_arm_that_runs() -> None:
    namespace = type("namespace", (), {"act": staticmethod(lambda x: torch.ops.measuretest.square(x))})

    @torch.compiler.disable
    def raw(x: torch.Tensor) -> torch.Tensor:
        return x * x

    torch._dynamo.reset()
    report = compare(
        lambda x: namespace.act(x * 2) + 1,
        torch.ones(256, 256),
        [SQUARE],
        raw=Swap(namespace, "act", raw),
        seconds=0.5,
        compile_options=FAST,
        predict=True,
    )
    assert report.ledger is not None
    assert [one.arm for one in report.ledger.ledgers] == ["op", "raw"]
    for one in report.ledger.ledgers:
        assert sum(t.us_per_step or 0 for t in one.terms) == pytest.approx(one.total_us, abs=0.5)
