"""The script that a finding prints runs by itself, fails on the faulty op, and passes on the mended twin."""

from __future__ import annotations

import os
import subprocess
import sys
import traceback
from pathlib import Path

import pytest
import torch

from opgraft.diagnostics.conform.lab.isolate import Message, Send, run_isolated
from tests.conform.ops import PAIRS
from tests.conform.test_checks import compiler, examined  # noqa: F401 - a fixture

ROOT = Path(__file__).resolve().parents[2]
# What shows these is no failing script: a note (data-dependent-shape), a crash that depends on what lies in memory
# (out-of-bounds of a result), or a state that the test set up in its own process.
SILENT = {
    "data-dependent-shape", "data-dependent-shape: fixed", "not-exportable: Python alone", "sharding", "layout-copy",
    "functional-copy", "pickling", "compiled", "kernel-not-run", "dropped-effect", "out-of-bounds: result",
    "out-of-bounds: index", "out-of-bounds: a result that grows",
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


# Run in a process that has imported nothing; the rest in forks of this one, each with names of its own.
ALONE = ("missing-fake", "layout-assumed: a write that is lost")


def ends_well(script: str) -> tuple[bool, str]:
    said: list[Message] = []

    def work(send: Send) -> None:
        torch.set_num_threads(1)
        torch._dynamo.reset()
        try:
            exec(compile(script, "snippet.py", "exec"), {"__name__": "__main__"})
        except BaseException:
            send({"text": traceback.format_exc()[-600:]})

    ending = run_isolated(work, said.append, seconds=180.0)
    return ending.how == "done" and not said, said[-1]["text"] if said else ending.sentence


def ends_well_alone(script: str) -> tuple[bool, str]:
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
    run = ends_well_alone if name in ALONE else ends_well
    well, said = run(script)
    assert not well, script
    assert "SyntaxError" not in said
    assert "NameError" not in said
    assert "ModuleNotFoundError" not in said
    if name in DECLARED:
        return
    bad, good = (word.replace("::", ".") for word in (pair.bad, pair.good))
    well, said = run(IMPORTS + script.replace(f"torch.ops.{bad}(", f"torch.ops.{good}(").replace(f"{bad}.", f"{good}."))
    assert well, f"{script}\n{said}"
