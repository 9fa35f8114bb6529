"""A part of the corpus, one case of most kinds; ``tests/corpus/run`` scores all of it."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

import pytest

HERE = Path(__file__).parent
CASES = [
    "clean/two_sizes_twice.py",
    "data-branch/newton_until_small.py",
    "data-dependent-shape/batch_padding_size.py",
    "disabled/adapter_library_stack.py",
    "host-code/lock_around_kernel.py",
    "host-read/token_lists.py",
    "library-jit/experts_compiled_by_their_author.py",
    "missing-fake/nested_projection.py",
    "other-break/compiled_block_traced_again.py",
    "other-break/routed_branches.py",
    "recompile/module_counter.py",
    "side-effect/progress_print_solver.py",
    "untraceable-autograd/spiking_surrogate.py",
]


@pytest.fixture(scope="module")
def score() -> ModuleType:
    loader = SourceFileLoader("corpus_score", str(HERE / "score"))
    spec = importlib.util.spec_from_loader("corpus_score", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


@pytest.mark.core
@pytest.mark.parametrize("name", CASES)
def test_case(name: str, score: ModuleType, tmp_path: Path) -> None:
    case = score.read_case(HERE / "cases" / name)
    out = tmp_path / "report.json"
    command = [sys.executable, "-m", "opgraft.diagnostics.cli", "explain", "--no-check-ops", "-q", "--json", str(out)]
    subprocess.run([*command, str(case["path"])], check=False, cwd=tmp_path, timeout=300, capture_output=True)
    marks, wrong = score.judge(case, json.loads(out.read_bytes())["findings"])
    assert [(kind, found, right) for kind, found, right in marks if not right] == []
    assert [(found["kind"], found["location"]["line"]) for found in wrong] == []
