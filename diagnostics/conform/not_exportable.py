"""Export, AOTInductor or a fresh process cannot carry the op.

**What it means.** ``torch.export`` fails on a model with the op, the exported program gives other values, or the op
exists only because a Python module was imported here.

**Why it matters.** A process without that module, a C++ server above all, cannot load what was exported.

Fails: an op from ``torch.library.custom_op`` in a program that a server loads. Passes: an op whose schema and kernel
are registered in a shared library, which the server loads with ``torch.ops.load_library``.

**Remedies.** ``load-library``, ``fix-schema``.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import torch

from opgraft.diagnostics.conform.lab.bench import Bench, Fault, NotApplicable, sentence
from opgraft.diagnostics.conform.lab.case import Case, called, given
from opgraft.diagnostics.conform.lab.memory import fresh_values
from opgraft.diagnostics.conform.lab.tree import tensors

KIND = "not-exportable"


TAIL = """\
class Model(torch.nn.Module):
    def forward(self, {names}):
        return {call}
program = torch.export.export(Model(), ({names},))
torch.testing.assert_close(program.module()({names}), {call})"""


def inputs(case: Case) -> tuple[Any, ...]:
    """The arguments that hold tensors, in fresh memory: a model's inputs. The rest are its constants."""
    return tuple(value for value in fresh_values(case) if tensors(value))


def holder(op: Any, case: Case) -> torch.nn.Module:
    """A model that does nothing but call the op on its inputs."""
    constants = [None if tensors(value) else value for value in given(case)]
    places = [index for index, value in enumerate(given(case)) if tensors(value)]

    class Model(torch.nn.Module):
        def forward(self, *inputs: Any) -> Any:
            filled = list(constants)
            for index, value in zip(places, inputs, strict=True):
                filled[index] = value
            return called(op, case, filled)

    return Model()


def check(bench: Bench) -> Iterator[Fault]:
    if not bench.cases[0].tensors:
        raise NotApplicable("the op takes no tensor")
    case = bench.cases[0]
    bench.needs_fakes(case)
    bench.tell(case, doing="compile")
    try:
        with torch.no_grad():
            program = torch.export.export(holder(bench.op, case), inputs(case))
            torch.export.save(program, io.BytesIO())
            wanted, found = bench.real(case), program.module()(*inputs(case))
    except Exception as error:
        yield Fault(
            f"{bench.name} cannot be exported: {sentence(error)}",
            case,
            remedies=("fix-schema",),
            severity="warning",
            tail=TAIL,
        )
        return
    if wanted.ok and not bench.facts.tagged("nondeterministic_seeded"):
        words = bench.disagree(tensors(wanted.outputs), tensors(found), case)
        if words:
            yield Fault(f"{bench.name} gives other values exported: {words}", case, remedies=("fix-schema",), tail=TAIL)
            return
    if bench.facts.in_python:
        yield Fault(
            f"{bench.name} exists only where its Python module is imported: a process without it cannot load an "
            "exported program",
            case,
            remedies=("load-library",),
            severity="note",
        )
