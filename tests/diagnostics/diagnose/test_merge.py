"""One cause, one finding: what the doctor says of an op takes the place of what follows from it in the run."""

from __future__ import annotations

from opgraft.diagnostics.diagnose.merge import merge
from opgraft.diagnostics.kinds import KINDS
from opgraft.diagnostics.model import Callee, CheckResult, Counts, Finding, Location, Report, Severity


def make(kind: str, line: int, severity: Severity, op: str = "") -> Finding:
    return Finding(
        kind=kind,
        code=KINDS[kind].code,
        severity=severity,
        message=kind,
        location=Location(path="/model.py", line=line),
        callee=Callee(name=op, owner="op") if op else None,
        counts=Counts(compiles=3),
    )


def merged(seen: Finding, *found: Finding) -> list[tuple[str, int]]:
    report = merge(Report(opgraft="0", torch="2.13.0", findings=(seen,)), found, ())
    return [(f.kind, f.counts.compiles) for f in report.findings]


def test_the_same_missing_fake_is_said_once_with_the_runs_counts() -> None:
    assert merged(make("missing-fake", 4, "error", "a::f"), make("missing-fake", 4, "error", "a::f")) == [
        ("missing-fake", 3)
    ]


def test_a_failed_compile_follows_from_the_ops_fault_at_its_line() -> None:
    assert merged(make("other-break", 4, "error"), make("composite-kernel", 4, "error", "a::f")) == [
        ("composite-kernel", 3)
    ]


def test_recompiles_of_a_specialising_fake_belong_to_it() -> None:
    assert merged(make("recompile", 4, "warning"), make("fake-specializes", 4, "warning", "a::f")) == [
        ("fake-specializes", 3)
    ]


def test_a_read_on_the_line_of_a_faulty_op_stays() -> None:
    found = merged(make("host-read", 4, "warning"), make("wrong-value", 4, "error", "a::f"))
    assert sorted(kind for kind, _ in found) == ["host-read", "wrong-value"]


def test_a_tensor_given_for_a_number_is_no_fault_of_the_fake() -> None:
    assert merged(make("host-read", 4, "error"), make("fake-mismatch", 4, "error", "a::f")) == [("host-read", 3)]


def test_other_lines_and_notes_take_nothing_away() -> None:
    assert len(merged(make("other-break", 4, "error"), make("composite-kernel", 9, "error", "a::f"))) == 2
    assert len(merged(make("other-break", 4, "error"), make("wrong-value", 4, "note", "a::f"))) == 2


def test_the_checks_are_kept() -> None:
    check = CheckResult(op="a::f", check="fake", outcome="pass")
    assert merge(Report(opgraft="0", torch=""), (), (check,)).checks == (check,)
