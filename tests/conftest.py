"""What all tests share: devices, and the compiler's state put back after every test."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]


def _compile_cache() -> str:
    """A cache of compiled code for this state of the ops: a cache hit replays calls as an earlier schema had them."""
    digest = hashlib.sha256(torch.__version__.encode())
    for source in [ROOT / "csrc" / "schemas.cpp", *sorted((ROOT / "plugin").rglob("*.py"))]:
        digest.update(source.read_bytes())
    return str(Path(tempfile.gettempdir()) / f"opgraft-tests-{os.getuid()}-{digest.hexdigest()[:16]}")


# Before anything compiles, and for the processes that tests start as well.
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", _compile_cache())

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    yield
    torch._dynamo.reset()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)
