"""Skipped and split CUDA graphs: streams of ``programs/cudagraphs`` that were recorded on an H200, torch 2.11.0, and
constructed ones for what no program there meets."""

from __future__ import annotations

from pathlib import Path

import pytest

from opgraft.diagnostics.collect import events as ev
from opgraft.diagnostics.diagnose.report import diagnose
from opgraft.diagnostics.model import Finding, Location

STREAMS = Path(__file__).parents[1] / "streams"
PREFIXES = ("/env/site-packages/torch",)


def findings(*events: ev.Event) -> tuple[Finding, ...]:
    head = ev.Began(torch="2.13.0", opgraft="0", prefixes=PREFIXES)
    graph = ev.Graph(id="0/0", ops=2, location=Location(path="/model.py", line=3, text="y = x + 1"))
    end = ev.CompileEnded(id="0/0", function="step", path="/model.py", line=1, ops=2, forward=True)
    return diagnose([head, ev.CompileBegan(id="0/0"), graph, end, *events]).findings


def test_a_mutated_input_is_named_with_its_line() -> None:
    reason = (
        'skipping cudagraphs due to mutated inputs (1 instances). Found from : \n   File "/model.py", line 7, in step\n'
        "    cache.add_(x)\n"
    )
    (found,) = findings(ev.CudagraphsSkipped(reason=reason, id="0/0"))
    assert (found.kind, found.location.path, found.location.line) == ("cudagraph-skip", "/model.py", 7)
    assert found.remedies[0].id == "make-functional"
    assert "This is no graph break" in found.message


def test_a_cpu_tensor_asks_for_the_device() -> None:
    (found,) = findings(ev.CudagraphsSkipped(reason="skipping cudagraphs due to cpu device (arg0_1)", id="0/0"))
    assert found.location.line == 3
    assert found.remedies[0].id == "keep-on-device"


def test_partitions_without_a_reason_are_told_from_the_counter() -> None:
    (found,) = findings(ev.Ended(counters={"inductor.cudagraph_partitions": 3}))
    assert "3 partitions" in found.message


def test_the_same_reason_twice_is_one_finding() -> None:
    skip = ev.CudagraphsSkipped(reason="skipping cudagraphs due to cpu device", id="0/0")
    assert len(findings(skip, skip)) == 1


def test_nothing_is_said_where_nothing_was_skipped() -> None:
    assert findings(ev.Ended(counters={"inductor.cudagraph_partitions": 1})) == ()


RECORDED = [
    ("mutated", 5, "mutated inputs (1 instances)", "make-functional"),
    ("inplace_layer", 11, "mutated inputs (2 instances)", "make-functional"),
    ("cpu_tensor", 6, "cut into 2 parts, because some of it cannot be recorded: cpu ops", "keep-on-device"),
    ("cpu_tensor_whole", 8, "cpu device", "keep-on-device"),
    ("partition", 14, "cut into 3 parts, because some of it cannot be recorded: CUDAGraph-unsafe", "keep-on-device"),
    ("partition_whole", 16, "incompatible op mine.swap.default", "keep-on-device"),
    ("unbacked", 7, "cut into 4 parts, because some of it cannot be recorded: unbacked", "keep-on-device"),
    ("unbacked_whole", 9, "incompatible op aten.index.Tensor", "keep-on-device"),
    ("dynamic", 5, "recorded for every distinct input size, 9 so far", "leave-it"),
    ("dynamic_whole", 7, "No CUDA graph is made", "leave-it"),
]


@pytest.mark.parametrize(("name", "line", "words", "remedy"), RECORDED, ids=[row[0] for row in RECORDED])
def test_recorded_on_a_gpu(name: str, line: int, words: str, remedy: str) -> None:
    report = diagnose(ev.read_events(STREAMS / f"cudagraphs-{name}-2.11.0.jsonl"))
    (found,) = [one for one in report.findings if one.severity != "note" and one.kind != "recompile"]
    assert (found.kind, found.location.path, found.location.line) == ("cudagraph-skip", f"cudagraphs/{name}.py", line)
    assert words in found.message
    assert found.remedies[0].id == remedy
    assert report.device == "NVIDIA H200"
