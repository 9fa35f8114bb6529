"""The script that a finding prints runs by itself, fails on the faulty op, and passes on the mended twin."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conform.ops import PAIRS
from tests.conform.test_checks import examined

ROOT = Path(__file__).resolve().parents[2]
# What shows these is no failing script: a note (data-dependent-shape), a crash that depends on what lies in memory
# (out-of-bounds of a result), or a state that the test set up in its own process.
SILENT = {
    "data-dependent-shape", "data-dependent-shape: fixed", "not-exportable: Python alone", "sharding", "layout-copy",
    "functional-copy", "pickling", "compiled", "kernel-not-run", "dropped-effect", "out-of-bounds: result",
    "out-of-bounds: index",
    "missing-kernel", "bad-schema", "composite-kernel", "opcheck", "aotinductor", "unstable-result: integers",
    "cache-bypass", "overdeclared-mutation", "not-exportable",
}  # fmt: skip

# The twin does the same and says so, refuses the dtype that shows the fault, has a fault of another kind there, or
# takes other arguments.
DECLARED = {
    "undeclared-mutation",
    "unstable-result",
    "wrong-value: a dtype taken for another",
    "wrong-gradient: no float64",
    "fake-specializes: a mode",
    "missing-autograd: results without one",
    "opcheck: 8-bit floats",
    "gradient-layout: zero but for rounding",
}
# The module that registers a twin is another one than the faulty op's.
IMPORTS = "import tests.conform.ops\n"


def ends_well(script: str) -> tuple[bool, str]:
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=180,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    return done.returncode == 0, done.stderr[-600:]


@pytest.mark.parametrize("name", sorted(PAIRS.keys() - SILENT))
def test_the_script_shows_the_fault_and_nothing_in_the_twin(name: str) -> None:
    pair = PAIRS[name]
    findings, _ = examined(pair, pair.bad)
    found = next(finding for finding in findings if finding.kind == pair.kind)
    script = found.evidence[-1].removeprefix("to see it:\n")
    well, said = ends_well(script)
    assert not well, script
    assert "SyntaxError" not in said
    assert "NameError" not in said
    assert "ModuleNotFoundError" not in said
    if name in DECLARED:
        return
    bad, good = (word.replace("::", ".") for word in (pair.bad, pair.good))
    well, said = ends_well(
        IMPORTS + script.replace(f"torch.ops.{bad}(", f"torch.ops.{good}(").replace(f"{bad}.", f"{good}.")
    )
    assert well, f"{script}\n{said}"
