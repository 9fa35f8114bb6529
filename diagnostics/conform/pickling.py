"""A pickled model with the op does not come back.

**What it means.** A ``torch.fx.GraphModule`` that calls the op cannot be pickled or loaded; or a fresh process, which
has imported what registers the op and nothing else, does not know the op or computes other values.

**Why it matters.** Spawned workers, job launchers and compile workers get their models this way. What a kernel reads
from module state that was set by hand in the parent is not there.

Fails: a kernel that reads a global, which ``configure(scale=3)`` set after the import. Passes: the same with the scale
as an argument.

**Remedies.** ``pass-state`` in the kernel: state goes in as an argument; ``load-library``: register at import.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from opgraft.diagnostics.conform.lab import saved
from opgraft.diagnostics.conform.lab.bench import Bench, Fault, NotApplicable, NotRun, sentence
from opgraft.diagnostics.conform.lab.case import Case, called, given
from opgraft.diagnostics.conform.lab.memory import fresh_values
from opgraft.diagnostics.conform.lab.tree import tensors

KIND = "not-exportable"
SECONDS = 60.0
TAIL = """\
import pickle
class Model(torch.nn.Module):
    def forward(self, {names}):
        return {call}
model = pickle.loads(pickle.dumps(torch.fx.symbolic_trace(Model())))
torch.testing.assert_close(model({names}), {call})
# and the same bytes in a process that has only imported what registers the op"""


def graph_of(bench: Bench, case: Case) -> torch.fx.GraphModule:
    """A graph whose placeholders are the arguments, with the op in the middle."""
    graph = torch.fx.Graph()
    places = [graph.placeholder(f"x{index}") for index in range(len(given(case)))]
    graph.output(called(functools.partial(_call_function, graph, bench.op), case, places))
    return torch.fx.GraphModule(torch.nn.Module(), graph)


def _call_function(graph: torch.fx.Graph, op: Any, *args: Any, **kwargs: Any) -> torch.fx.Node:
    return graph.call_function(op, args, kwargs)


def elsewhere(bench: Bench, case: Case, model: bytes) -> tuple[Any, str]:
    """The model's results in a fresh process that has imported what registers the op; or what it said in the end."""
    with tempfile.TemporaryDirectory(prefix="opgraft-pickle-") as folder:
        place = Path(folder)
        (place / "model.pkl").write_bytes(model)
        saved.save_cases(place / "call", (Case(tuple(given(case))),))
        environment = dict(os.environ, PYTHONPATH=os.pathsep.join(path or os.getcwd() for path in sys.path))
        command = [sys.executable, "-m", "opgraft.diagnostics.conform.lab.unpickle", str(place), *bench.registrars]
        try:
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=SECONDS)
        except subprocess.TimeoutExpired:
            return None, "it did not come back in time"
        if done.returncode:
            lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
            return None, lines[-1][:200] if lines else f"it ended with {done.returncode}"
        return torch.load(place / "results.pt", weights_only=True), ""


def check(bench: Bench) -> Iterator[Fault]:
    import pickle

    if not bench.cases[0].tensors:
        raise NotApplicable("the op takes no tensor")
    case = bench.cases[0]
    wanted = bench.real(case)
    if not wanted.ok:
        raise NotRun(f"the op refuses the call: {sentence(wanted.error)}")
    bench.tell(case, doing="compile")
    try:
        model = pickle.dumps(graph_of(bench, case))
        with torch.no_grad():
            torch.manual_seed(0)
            found = tensors(pickle.loads(model)(*fresh_values(case)))
    except Exception as error:
        yield Fault(
            f"a model with {bench.name} cannot be pickled and loaded: {sentence(error)}",
            case,
            remedies=("fix-schema",),
            severity="warning",
            tail=TAIL,
        )
        return
    if not bench.registrars:
        raise NotRun("pickled and loaded here; for a fresh process it is not known what registers the op: --import")
    steady = not bench.facts.tagged("nondeterministic_seeded") and tensors(wanted.outputs)
    try:
        found, trouble = elsewhere(bench, case, model)
    except TypeError as error:
        raise NotRun(sentence(error)) from error
    words = trouble or (bench.disagree(tensors(found), tensors(wanted.outputs), case) if steady else "")
    if not words:
        return
    imported = ", ".join(bench.registrars)
    what = f"fails: {trouble}" if trouble else f"gives other values: {words}"
    yield Fault(
        f"a pickled model with {bench.name}, loaded in a fresh process that imported {imported}, {what}",
        case,
        remedies=("load-library",) if trouble else ("pass-state",),
        severity="warning",
        tail=TAIL,
    )
