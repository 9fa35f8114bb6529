"""Stored event streams of larger programs, of several torch versions, keep giving the reports that were looked at.

Each report was read beside TORCH_LOGS=graph_breaks,recompiles of the same run and beside the source lines that it
points at, on 2.13.0; the other versions give the same. What was wrong then was mended.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from opgraft.diagnostics.collect.events import read_events, write_events
from opgraft.diagnostics.diagnose.report import diagnose
from opgraft.diagnostics.model import Finding

STREAMS = Path(__file__).parents[1] / "streams"

EXPECTED = {
    # A prompt of 8 tokens, then one at a time, then the cache grows: the call hands in other sizes twice. No break.
    "llama": [("recompile", "llama.py", 22, 2, 0)],
    "mamba": [],
    "mixtral": [
        ("data-dependent-shape", "modeling_mixtral.py", 79, 10, 3),  # which experts were hit
        ("other-break", "output_capturing.py", 256, 1, 1),  # a dict comprehension over an iterator of keys
        ("data-branch", "modeling_mixtral.py", 83, 1, 1),  # `if expert_idx == self.num_experts` in the loop
        ("recompile", "activations.py", 103, 1, 0),  # every expert gets another number of tokens
    ],
    "gnn": [
        ("recompile", "gnn.py", 16, 24, 0),  # `points` has another number of rows, and all behind it has
        ("data-dependent-shape", "loop.py", 650, 12, 0),  # edge_index[:, mask]
        ("data-dependent-shape", "loop.py", 113, 10, 0),
        ("data-dependent-shape", "gnn.py", 17, 2, 0),  # (distances < 1.0).nonzero()
    ],
    "training": [
        ("recompile", "training.py", 23, 8, 1),  # self.average is a new float at every call, up to torch's limit of 8
        ("data-branch", "training.py", 26, 15, 0),  # torch.isnan(loss), which only raises
        ("host-read", "training.py", 23, 8, 0),  # loss.item()
    ],
}
VERSIONS = ("2.13.0", "2.14.1", "2.15.0")


def summary(found: Finding) -> tuple[str, str, int, int, int]:
    place = found.location
    return found.kind, Path(place.path).name, place.line, found.counts.compiles, found.counts.frames_skipped


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", EXPECTED)
def test_stored_stream(name: str, version: str) -> None:
    report = diagnose(read_events(STREAMS / f"{name}-{version}.jsonl"))
    assert [summary(found) for found in report.findings] == EXPECTED[name]
    assert report.torch.partition("+")[0] == version


def first(name: str, kind: str) -> Finding:
    report = diagnose(read_events(STREAMS / f"{name}-2.13.0.jsonl"))
    return next(found for found in report.findings if found.kind == kind)


def test_what_the_reports_say_of_causes_and_remedies() -> None:
    llama = first("llama", "recompile")
    assert "input_ids.size(1) 8 -> 1, past_key_values.layers[0].keys.size(2) 8 -> 9" in llama.message
    assert "mark_dynamic(past_key_values.layers[0].keys, 2)" in llama.remedies[0].text
    assert "input_ids.size(1) is 0 or 1 at times" in llama.remedies[0].text
    assert "points.size(0) 24 -> 30" in first("gnn", "recompile").message
    assert "self.average has another value at every call" in first("training", "recompile").message
    assert "0-dimensional tensor" in first("training", "recompile").remedies[0].text
    assert "only raises" in first("training", "data-branch").message
    assert "_assert_async" in first("training", "data-branch").remedies[0].text
    assert "nonzero_static" in first("mixtral", "data-dependent-shape").remedies[0].text
    assert any("compiled again" in line for line in first("training", "host-read").evidence)


def test_every_finding_names_a_line_that_the_reader_can_change() -> None:
    for path in STREAMS.glob("*.jsonl"):
        for found in diagnose(read_events(path)).findings:
            assert "/site-packages/torch/" not in found.location.path
            assert found.location.text.strip() or found.location.path.startswith("cudagraphs/")


def test_a_stream_that_was_cut_off_is_read_up_to_the_cut(tmp_path: Path) -> None:
    whole = (STREAMS / "training-2.13.0.jsonl").read_bytes()
    (tmp_path / "cut.jsonl").write_bytes(whole[: len(whole) // 2])
    assert diagnose(read_events(tmp_path / "cut.jsonl")).findings
    (tmp_path / "garbage.jsonl").write_bytes(b"\x00\xff{]\n" + whole)
    assert diagnose(read_events(tmp_path / "garbage.jsonl")) == diagnose(read_events(STREAMS / "training-2.13.0.jsonl"))


def test_saved_and_loaded_events_are_equal(tmp_path: Path) -> None:
    events = list(read_events(STREAMS / "gnn-2.13.0.jsonl"))
    write_events(tmp_path / "copy.jsonl", events)
    assert list(read_events(tmp_path / "copy.jsonl")) == events


def test_diagnosis_and_reports_do_not_import_torchs_compiler(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path\n"
        "from opgraft.diagnostics.collect.events import read_events\n"
        "from opgraft.diagnostics.diagnose.report import diagnose\n"
        "from opgraft.diagnostics.report import html, json, markdown, sarif\n"
        f"report = diagnose(read_events(Path({str(STREAMS / 'mixtral-2.13.0.jsonl')!r})))\n"
        "html.to_html(report); json.to_bytes(report); markdown.to_markdown(report); sarif.to_sarif(report)\n"
        "assert 'torch._dynamo' not in sys.modules and 'torch._inductor' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
