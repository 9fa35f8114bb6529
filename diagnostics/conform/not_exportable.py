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
from opgraft.diagnostics.conform.lab.memory import fresh_call
from opgraft.diagnostics.conform.lab.tree import tensors

KIND = "not-exportable"


def check(bench: Bench) -> Iterator[Fault]:
    if not bench.cases[0].tensors:
        raise NotApplicable("the op takes no tensor")
    case = bench.cases[0]
    args, kwargs = fresh_call(case, requires_grad=False)
    op = bench.op

    class Model(torch.nn.Module):
        def forward(self, *given: Any) -> Any:
            return op(*given, **kwargs)

    bench.tell(case, doing="compile")
    try:
        with torch.no_grad():
            program = torch.export.export(Model(), args)
            torch.export.save(program, io.BytesIO())
            wanted, found = bench.real(case), program.module()(*fresh_call(case, requires_grad=False)[0])
    except Exception as error:
        yield Fault(
            f"{bench.name} cannot be exported: {sentence(error)}", case, remedies=("fix-schema",), severity="warning"
        )
        return
    if wanted.ok and not bench.facts.tagged("nondeterministic_seeded"):
        words = bench.disagree(tensors(wanted.outputs), tensors(found), case)
        if words:
            yield Fault(f"{bench.name} gives other values exported: {words}", case, remedies=("fix-schema",))
            return
    if bench.facts.in_python:
        yield Fault(
            f"{bench.name} exists only where its Python module is imported: a process without it cannot load an "
            "exported program",
            case,
            remedies=("load-library",),
            severity="note",
        )
