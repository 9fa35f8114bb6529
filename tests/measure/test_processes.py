"""Fresh processes: a crash, a time limit and a wrong name each end in words, and the other arms keep their results."""

from __future__ import annotations

from pathlib import Path

import pytest

from opgraft.diagnostics.measure import campaign
from opgraft.diagnostics.measure.compare import compare_file
from opgraft.diagnostics.measure.processes import Ended, RefusedError, ask
from opgraft.diagnostics.measure.readings import Reading
from opgraft.diagnostics.measure.request import Request

MODELS = str(Path(__file__).parent / "measured.py")
FAST = {"backend": "aot_eager"}


def request(function: str, **options: object) -> Request:
    return Request(
        task="time", target=f"{MODELS}:{function}", compile_options=FAST, seconds=0.3, alone_seconds=0.1, **options
    )  # type: ignore[arg-type]


def test_a_process_gives_its_reading_and_the_run_its_report() -> None:
    stages: list[str] = []
    report = compare_file(
        f"{MODELS}:build", seconds=0.5, processes=1, compile_options=FAST, ledger=False,
        progress=lambda message, share: stages.append(message),
    )  # fmt: skip
    assert report.ledger is not None
    assert {a.name for a in report.ledger.arms} == {"eager", "compiler", "op"}
    assert report.ledger.ops == ("measuretest::square",)
    assert any("compiling op" in s for s in stages)
    assert "1 processes" not in report.ledger.sentence


def test_an_op_that_ends_the_process_is_a_finding_and_the_compilers_arm_is_kept() -> None:
    found = campaign.run(
        request("build_fatal", ops=("measuretest::fatal",), arms=("op",)),
        processes=1,
        limit=300,
        ledger=False,
        fresh=False,
    )
    # In eager the op ends the checks, compiled it ends its arm.
    assert [p.about for p in found.problems] == ["process-failed", "not-checked", "arm-failed"]
    assert all("SIGABRT" in p.message for p in found.problems)
    assert found.readings[0].arm("compiler") is not None
    row = found.readings[0].arm("op")
    assert row is not None
    assert "SIGABRT" in row.failed


def test_a_process_that_does_not_end_is_killed() -> None:
    answer = ask(request("build"), Reading, limit=0.5, fresh=False)
    assert isinstance(answer, Ended)
    assert "did not end within" in answer.how


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("absent", "no function absent; it has build, build_fatal, build_nothing, square"),
        ("build_nothing", "return \\(model, inputs\\)"),
    ],
)
def test_what_cannot_be_asked_is_refused_in_a_sentence(function: str, words: str) -> None:
    with pytest.raises(RefusedError, match=words):
        ask(request(function), Reading, limit=200, fresh=False)
