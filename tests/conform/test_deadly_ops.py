"""An op that crashes, hangs, leaves, or wants all memory is a finding, and never the end of the doctor."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest

import tests.conform.ops  # noqa: F401
from opgraft.diagnostics.conform.lab import examine as examining
from opgraft.diagnostics.conform.lab.bench import Bench, Fault
from opgraft.diagnostics.conform.lab.examine import examine
from opgraft.diagnostics.conform.lab.facts import facts_of
from opgraft.diagnostics.conform.lab.order import Check
from opgraft.diagnostics.conform.lab.plan import Plan
from opgraft.registry import resolve


def run(name: str, *checks: str):
    return examine(Plan(facts=facts_of(resolve(name)), seconds=60.0), [Check(check) for check in checks])


@pytest.mark.parametrize(
    ("op", "words"),
    [
        ("crashes", "SIGSEGV"),
        ("leaves_process", "exit code 3"),
        ("exits", "exit code 4"),
        ("kills_itself", "SIGKILL"),
        ("hangs", "did not come back"),
    ],
)
def test_a_deadly_op_is_a_finding(op: str, words: str) -> None:
    findings, results = run(f"faulty::{op}", "undeclared_mutation")
    assert [finding for finding in findings if words in finding.message]
    assert results


class Slow:
    """A check that is slow itself, after its call has come back."""

    name = kind = "slow"

    def run(self, bench: Bench) -> Iterator[Fault]:
        bench.real(bench.cases[0])
        time.sleep(60)
        yield Fault("never")


def test_silence_after_a_call_is_not_blamed_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examining, "SILENCE_SECONDS", 1.0)
    findings, (result,) = examine(Plan(facts=facts_of(resolve("faulty::good_double")), seconds=60.0), [Slow()])
    assert not findings
    assert (result.outcome, result.detail) == ("not-run", examining.SLOW)


class Dying:
    """A check in which the process dies before a call of its own."""

    name = kind = "dying"

    def run(self, bench: Bench) -> Iterator[Fault]:
        os.abort()
        yield Fault("never")


def test_a_death_after_a_call_is_blamed_on_it() -> None:
    findings, (result,) = examine(Plan(facts=facts_of(resolve("faulty::good_double")), seconds=60.0), [Dying()])
    assert "SIGABRT" in findings[0].message
    assert result.outcome == "fail"


def test_what_was_found_before_a_crash_is_kept() -> None:
    findings, results = run("faulty::crashes_when_empty", "missing_autograd", "empty_input", "misaligned")
    assert {"missing-autograd", "empty-input"} <= {finding.kind for finding in findings}
    assert {result.check: result.outcome for result in results}["misaligned"] == "pass"


@pytest.mark.parametrize("op", ["eats_memory", "eats_memory_slowly"])
def test_an_op_that_wants_too_much_memory_is_refused(op: str) -> None:
    findings, results = run(f"faulty::{op}", "undeclared_mutation")
    said = " ".join([results[0].detail, *(finding.message for finding in findings)])
    assert results[0].outcome in ("not-run", "fail")
    assert any(word in said for word in ("memory", "alloc", "SIG", "MemoryError")), said


@pytest.mark.parametrize(
    ("change", "loose", "refused"), [("layout", False, True), ("", True, True), ("", False, False)]
)
def test_an_assertion_on_the_device_over_an_input_of_ours_is_a_refusal(change: str, loose: bool, refused: bool) -> None:
    from opgraft.diagnostics.conform.lab.examine import _Notes, _refused

    lost = "CUDA error: device-side assert triggered"
    assert _refused(_Notes(key="sample 0", change=change, loose=loose, lost=lost)) is refused
    assert not _refused(_Notes(key="sample 0", change=change, loose=loose, lost="CUDA error: illegal memory access"))
