"""Every check finds its fault in a faulty op, and nothing in the mended twin."""

from __future__ import annotations

import pytest
import torch

from opgraft.diagnostics.conform.lab.examine import Plan, examine
from opgraft.diagnostics.conform.lab.facts import facts_of
from opgraft.diagnostics.conform.lab.order import CHECKS, Check
from opgraft.registry import resolve
from tests.conform.ops import faulty

# Kinds that a check may find beside the planted one, for what they share with it.
ASKED = sorted(faulty.PAIRS)


def run(name: str, check: str, seconds: float = 60.0):
    plan = Plan(facts=facts_of(resolve(name)), seconds=seconds)
    return examine(plan, [Check(check.replace("-", "_"))])


@pytest.mark.parametrize("check", ASKED)
def test_the_faulty_op_is_found(check: str) -> None:
    kind = check.partition(":")[0]
    findings, _ = run(faulty.PAIRS[check][0], kind)
    assert kind in {finding.kind for finding in findings}
    found = next(finding for finding in findings if finding.kind == kind)
    assert found.callee is not None
    assert found.callee.name == faulty.PAIRS[check][0]
    assert found.remedies


@pytest.mark.parametrize("check", ASKED)
def test_the_mended_twin_is_not(check: str) -> None:
    findings, results = run(faulty.PAIRS[check][1], check.partition(":")[0])
    assert not [finding.message for finding in findings if finding.severity != "note"]
    assert all(result.outcome != "fail" for result in results)


def test_a_snippet_shows_the_fault() -> None:
    findings, _ = run(faulty.PAIRS["wrong-gradient"][0], "wrong-gradient")
    snippet = findings[0].evidence[-1].removeprefix("to see it:\n")
    scope: dict[str, object] = {}
    exec(compile(snippet, "snippet", "exec"), scope)
    assert isinstance(scope["t1"], torch.Tensor)


@pytest.mark.parametrize(
    ("op", "words"),
    [
        ("crashes", "SIGSEGV"),
        ("leaves_process", "exit code 3"),
        ("hangs", "did not come back"),
    ],
)
def test_a_deadly_op_is_a_finding(op: str, words: str) -> None:
    findings, results = run(f"faulty::{op}", "undeclared-mutation")
    assert [finding for finding in findings if words in finding.message]
    assert results


def test_what_was_found_before_a_crash_is_kept() -> None:
    plan = Plan(facts=facts_of(resolve("faulty::crashes_when_empty")), seconds=60.0)
    findings, results = examine(plan, [Check("missing_autograd"), Check("empty_input"), Check("misaligned")])
    assert {"missing-autograd", "empty-input"} <= {finding.kind for finding in findings}
    assert {result.check: result.outcome for result in results}["misaligned"] == "pass"


def test_an_op_that_wants_too_much_memory_is_refused() -> None:
    _, results = run("faulty::eats_memory", "undeclared-mutation")
    assert results[0].outcome == "not-run"
    assert "memory" in results[0].detail or "alloc" in results[0].detail


def test_every_check_has_a_page_and_remedies() -> None:
    from opgraft.diagnostics.kinds import KINDS

    for name in CHECKS:
        check = Check(name)
        assert check.kind in KINDS
        assert all(
            word in check.module.__doc__ for word in ("What it means", "Why it matters", "Remedies", "Passes"[1:])
        )
