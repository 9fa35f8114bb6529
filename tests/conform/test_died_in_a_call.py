"""A program that ends inside a call of an op: what is said depends on how the op is registered and what it got."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from opgraft.diagnostics.conform.recorded import check_recorded_calls


@pytest.mark.parametrize(
    ("more", "kind"),
    [
        ({}, "out-of-bounds"),
        ({"composite": True, "subclass": ""}, "out-of-bounds"),
        ({"composite": False, "subclass": "Measured"}, "out-of-bounds"),
        ({"composite": True, "subclass": "Measured"}, "composite-kernel"),
    ],
)
def test_the_kind(tmp_path: Path, more: dict[str, Any], kind: str) -> None:
    recording = tmp_path / "recording"
    call = {"say": "call", "op": "ns::gain", "path": "train.py", "line": 3, **more}
    recording.write_text(json.dumps(call) + "\n")
    (found,), _ = check_recorded_calls(recording)
    assert (found.kind, found.severity, found.location.line) == (kind, "error", 3)
    assert ("Measured" in found.message) == (kind == "composite-kernel")
