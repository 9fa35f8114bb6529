"""Every check finds its fault in a faulty op, and nothing in the mended twin."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from unittest import mock

import pytest

from opgraft.diagnostics import _compat
from opgraft.diagnostics.conform.lab.case import Case
from opgraft.diagnostics.conform.lab.examine import examine
from opgraft.diagnostics.conform.lab.facts import facts_of
from opgraft.diagnostics.conform.lab.order import CHECKS, Check
from opgraft.diagnostics.conform.lab.plan import Plan
from opgraft.diagnostics.model import CheckResult, Finding
from opgraft.registry import resolve
from tests.conform.ops import PAIRS, Pair

ASKED = sorted(PAIRS)
# What only a GPU shows has its ops in tests/gpu/faulty_ops.
ON_A_GPU = {"wrong-stream", "hidden-sync", "unchecked-launch", "wrong-device", "cudagraph-skip"}


@pytest.fixture(scope="module", autouse=True)
def compiler() -> Iterator[None]:
    """Imported once, and not in the fork of every check that compiles."""
    with mock.patch.dict(os.environ):
        _compat.load_compiler()
    return


_known: dict[tuple[str, str], tuple[tuple[Finding, ...], tuple[CheckResult, ...]]] = {}


def examined(pair: Pair, name: str) -> tuple[tuple[Finding, ...], tuple[CheckResult, ...]]:
    """Findings and results of the pair's check on one of its ops; made once for all tests that ask."""
    key = (pair.check, name)
    if key not in _known:
        if pair.setup is not None:
            pair.setup()
        given = pair.cases.get(name.partition("::")[2])
        cases = (Case(given, origin="sample"),) if given is not None else ()
        plan = Plan(facts=facts_of(resolve(name)), cases=cases, seconds=240.0, thorough=pair.thorough)
        _known[key] = examine(plan, [Check(pair.check.replace("-", "_"))])
    return _known[key]


@pytest.mark.parametrize("name", ASKED)
def test_the_faulty_op_is_found(name: str) -> None:
    pair = PAIRS[name]
    findings, results = examined(pair, pair.bad)
    assert pair.kind in {finding.kind for finding in findings}, results
    found = next(finding for finding in findings if finding.kind == pair.kind)
    assert found.callee is not None
    assert found.callee.name == pair.bad
    assert found.remedies
    assert (found.severity == "note") == pair.notes
    assert [result.outcome for result in results] == ["pass" if pair.notes else "fail"]


@pytest.mark.parametrize("name", ASKED)
def test_the_mended_twin_is_not(name: str) -> None:
    pair = PAIRS[name]
    findings, results = examined(pair, pair.good)
    bad = [finding.message for finding in findings if pair.notes or finding.severity != "note"]
    assert not bad
    assert [result.outcome for result in results] != ["fail"]
    assert "itself failed" not in results[0].detail


def test_every_check_has_a_failing_and_a_passing_op() -> None:
    missing = {name.replace("_", "-") for name in CHECKS} - {pair.check for pair in PAIRS.values()}
    assert missing == ON_A_GPU


def test_every_check_has_a_page_and_remedies() -> None:
    from opgraft.diagnostics.kinds import KINDS

    for name in CHECKS:
        check = Check(name)
        assert check.kind in KINDS
        assert all(word in check.module.__doc__ for word in ("What it means", "Why it matters", "Remedies", "asses"))


def test_pairs_are_data() -> None:
    assert all(dataclasses.is_dataclass(pair) for pair in PAIRS.values())
