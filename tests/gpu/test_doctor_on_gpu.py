"""The doctor finds every fault that only a GPU shows, and nothing in the mended twins."""

from __future__ import annotations

import importlib.util
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from opgraft.diagnostics.conform.host import examine_elsewhere
from opgraft.diagnostics.model import Report

pytestmark = [pytest.mark.gpu]
MODULE = Path(__file__).parent / "faulty_ops" / "__init__.py"
SECONDS = 25.0
AT_ONCE = 5


def _table() -> dict[str, tuple[str, str]]:
    """``PAIRS`` of the module, without loading its library."""
    source = MODULE.read_text(encoding="utf-8")
    scope: dict[str, dict[str, tuple[str, str]]] = {}
    exec(source[source.index("PAIRS = {") : source.index("SUMS = ")], scope)
    return scope["PAIRS"]


PAIRS = _table()
TWINS = sorted({twin for _, twin in PAIRS.values()})


@pytest.fixture(scope="module")
def reports() -> dict[str, Report]:
    spec = importlib.util.spec_from_file_location("faulty_gpu_ops", MODULE)
    assert spec is not None
    if not any(Path(folder, "libfaulty_ops.so").exists() for folder in _folders()):
        pytest.skip("libfaulty_ops.so is not built: tests/gpu/faulty_ops/build.sh")

    def one(name: str) -> Report:
        return examine_elsewhere((f"faulty_gpu::{name}",), imports=(str(MODULE),), device="cuda", seconds=SECONDS)

    names = [*PAIRS, *TWINS]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return dict(zip(names, pool.map(one, names), strict=True))


def _folders() -> list[str]:
    import os

    return [os.environ.get("FAULTY_OPS", str(MODULE.parent))]


@pytest.mark.parametrize("name", sorted(PAIRS))
def test_the_fault_is_found(name: str, reports: dict[str, Report]) -> None:
    kind = PAIRS[name][0]
    if kind == "wrong-device" and torch.cuda.device_count() < 2:
        (cell,) = [result for result in reports[name].checks if result.check == kind]
        assert cell.outcome == "not-run"
        assert "one GPU" in cell.detail
        return
    assert kind in {finding.kind for finding in reports[name].findings if finding.severity == "error"}


@pytest.mark.parametrize("name", TWINS)
def test_the_mended_twin_is_clean(name: str, reports: dict[str, Report]) -> None:
    report = reports[name]
    assert not [finding.message for finding in report.findings if finding.severity != "note"]
    assert {result.outcome for result in report.checks} >= {"pass"}
