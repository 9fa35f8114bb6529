"""A store of its own for every test, and one thread: what is decided does not depend on the machine."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def own_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "store"
    monkeypatch.setenv("OPGRAFT_STORE", str(folder))
    return folder
