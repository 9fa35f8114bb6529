"""A store of its own for every test, and no clock in the second look at a choice: what is decided does not depend on
the machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from opgraft.compile import measure

from models import agreeing


@pytest.fixture(autouse=True)
def own_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "store"
    monkeypatch.setenv("OPGRAFT_STORE", str(folder))
    return folder


@pytest.fixture(autouse=True)
def the_model_agrees(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stretch around a site is as the site's choice wants it; tests of that second look are marked
    ``own_second_look``."""
    if "own_second_look" not in request.keywords:
        monkeypatch.setattr(measure, "confirm", agreeing)
