"""One cause, one finding: what follows from another finding goes, and never both."""

from __future__ import annotations

import itertools

import pytest

from opgraft.diagnostics.conform.lab.settle import EXPLAINS, GRADIENTS_OFF, settle
from opgraft.diagnostics.kinds import KINDS
from opgraft.diagnostics.model import Callee, Finding, Location

pytestmark = pytest.mark.core
HERE = Location(path="model.py", line=1)


def _found(kind: str, op: str = "mine::op", evidence: tuple[str, ...] = ()) -> Finding:
    return Finding(
        kind=kind,
        code=KINDS[kind].code,
        severity="error",
        message=kind,
        location=HERE,
        evidence=evidence,
        callee=Callee(name=op, owner="op"),
    )


def test_no_kind_explains_itself_through_others() -> None:
    def follow(kind: str, path: tuple[str, ...]) -> None:
        assert kind not in path, " -> ".join((*path, kind))
        for effect in EXPLAINS.get(kind, ()):
            follow(effect, (*path, kind))

    for kind in EXPLAINS:
        follow(kind, ())


def test_of_two_findings_one_stays() -> None:
    for kinds in itertools.combinations(sorted(kind for kind in EXPLAINS if kind in KINDS), 2):
        assert settle(map(_found, kinds)), kinds


def test_a_read_past_the_end_is_the_cause_of_what_differs() -> None:
    effects = ("unstable-result", "index-overflow", "wrong-value", "wrong-stream", "wrong-device")
    (finding,) = settle(map(_found, ("out-of-bounds", *effects)))
    assert finding.kind == "out-of-bounds"


def test_another_op_is_another_matter() -> None:
    assert len(settle((_found("out-of-bounds"), _found("wrong-value", "mine::other")))) == 2


def test_a_gradient_is_no_cause_of_what_is_seen_without_one() -> None:
    bug = _found("compiler-bug")
    assert {finding.kind for finding in settle((_found("missing-autograd"), bug))} == {"missing-autograd"}
    seen = _found("compiler-bug", evidence=(GRADIENTS_OFF,))
    assert len(settle((_found("missing-autograd"), seen))) == 2
    assert len(settle((_found("fake-mismatch"), seen))) == 1
