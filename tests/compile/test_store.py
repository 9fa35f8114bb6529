"""The file of decisions: concurrent writers, crashes, and files that are not ours."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from opgraft.compile.site import Decision
from opgraft.compile.store import Store, merge, torch_minor

from models import one_warning

DECISION = Decision("kernel", "measured", measured=True, ratio=1.5, interval=(1.4, 1.6), noise=0.01, compiler_us=3.0)


def test_a_decision_is_found_by_another_process_and_can_be_read(tmp_path: Path) -> None:
    Store(tmp_path).put("cpu", "key", DECISION, {"op": "a::b"})
    assert Store(tmp_path).find("cpu", "key") == DECISION
    (path,) = tmp_path.glob("*.json")
    assert f"torch{torch_minor()}" in path.name
    assert json.loads(path.read_text())["decisions"]["key"]["op"] == "a::b"


def test_a_file_can_be_named_and_moved(tmp_path: Path) -> None:
    Store(tmp_path / "model.json").put("cpu", "key", DECISION, {})
    (tmp_path / "model.json").rename(tmp_path / "moved.json")
    assert Store(tmp_path / "moved.json").find("cpu", "key") == DECISION


def test_read_only_uses_and_writes_nothing(tmp_path: Path) -> None:
    Store(tmp_path).put("cpu", "key", DECISION, {})
    before = {p: p.stat().st_mtime_ns for p in tmp_path.iterdir()}
    store = Store(tmp_path, read_only=True)
    assert store.find("cpu", "key") == DECISION
    store.put("cpu", "other", DECISION, {})
    assert store.find("cpu", "other") == DECISION, "for this process"
    assert {p: p.stat().st_mtime_ns for p in tmp_path.iterdir()} == before


FILES = {
    "torn": '{"kind": "opgraft decisions", "format": 1, "decis',
    "foreign": '{"name": "package", "version": "1.0"}',
    "a list": "[1, 2]",
    "not text": b"\xff\xfe\x00\x01",
    "another torch": json.dumps({"kind": "opgraft decisions", "format": 1, "torch": "1.0", "decisions": {}}),
    "newer": json.dumps({"kind": "opgraft decisions", "format": 99, "torch": torch_minor(), "decisions": {}}),
    "older": json.dumps({"kind": "opgraft decisions", "format": 0, "torch": torch_minor(), "decisions": {}}),
    "no table": json.dumps({"kind": "opgraft decisions", "format": 1, "torch": torch_minor(), "decisions": [1]}),
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_cannot_be_used_is_ignored_with_one_warning(name: str, tmp_path: Path) -> None:
    path = tmp_path / "store.json"
    content = FILES[name]
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    store = Store(path)
    with one_warning("store.json"):
        assert store.find("cpu", "key") is None
        store.put("cpu", "key", DECISION, {})
        store.put("cpu", "other", DECISION, {})
    assert store.find("cpu", "key") == DECISION
    kept = path.read_bytes() == (content if isinstance(content, bytes) else content.encode())
    assert kept == (name in ("foreign", "a list", "another torch", "newer")), (
        "somebody else's file is never overwritten"
    )


@pytest.mark.parametrize(
    "entry", [{"choice": "maybe", "why": ""}, {"why": ""}, {"choice": "kernel", "why": "", "interval": 3}]
)
def test_an_entry_that_makes_no_sense_is_no_decision(entry: dict[str, object], tmp_path: Path) -> None:
    merge(tmp_path / "s.json", {"key": entry})
    assert Store(tmp_path / "s.json").find("cpu", "key") is None


def test_a_folder_that_cannot_be_written_costs_one_warning(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way of a folder")
    store = Store(tmp_path / "file" / "store")
    with one_warning("cannot be written"):
        store.put("cpu", "a", DECISION, {})
        store.put("cpu", "b", DECISION, {})
    assert store.find("cpu", "a") == DECISION


def test_a_full_disk_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "s.json"
    merge(path, {"old": {"choice": "kernel", "why": ""}})

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    store = Store(path)
    with one_warning("No space left"):
        store.put("cpu", "new", DECISION, {})
    monkeypatch.undo()
    assert set(json.loads(path.read_text())["decisions"]) == {"old"}
    assert [p.name for p in tmp_path.iterdir() if p.suffix not in (".json", ".lock")] == []


WRITER = """
import sys
from pathlib import Path
from opgraft.compile.store import merge
for i in range(20):
    merge(Path(sys.argv[1]), {f"{sys.argv[2]}-{i}": {"choice": "kernel", "why": ""}})
"""


def test_writers_at_once_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "s.json"
    running = [subprocess.Popen([sys.executable, "-c", WRITER, str(path), name]) for name in ("a", "b")]
    assert [process.wait(timeout=120) for process in running] == [0, 0]
    assert len(json.loads(path.read_text())["decisions"]) == 40


def test_a_writer_that_dies_leaves_a_whole_file_and_no_lock(tmp_path: Path) -> None:
    path = tmp_path / "s.json"
    merge(path, {"old": {"choice": "kernel", "why": ""}})
    code = (
        "import os, sys\nfrom pathlib import Path\nimport opgraft.compile.store as store\n"
        "os.replace = lambda *_: os._exit(9)\nstore.merge(Path(sys.argv[1]), {'new': {}})"
    )
    assert subprocess.run([sys.executable, "-c", code, str(path)], timeout=120).returncode == 9
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Store(path).put("cpu", "later", DECISION, {})
    assert set(json.loads(path.read_text())["decisions"]) == {"old", "later"}


def test_the_digest_follows_the_decisions(tmp_path: Path) -> None:
    store = Store(tmp_path)
    empty = store.digest()
    store.put("cpu", "key", DECISION, {})
    first = store.digest()
    store.put("cpu", "key", Decision("compiler", "", measured=True), {})
    assert len({empty, first, store.digest()}) == 3
