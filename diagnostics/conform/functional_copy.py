"""Functionalisation left a copy that eager does not make.

**What it means.** The op writes an argument; in the compiled graph the argument is copied before the call, since it is
read elsewhere or is a view.

**Why it matters.** A workspace or a cache is copied whole at every step.

Fails: an op that writes into a byte view of a workspace. Passes: the same op with a result of its own.

**Remedies.** ``make-functional``, ``add-out-variant``, ``reorder-writes``.
"""

from __future__ import annotations

from collections.abc import Iterator

from opgraft.diagnostics.conform.lab.bench import Bench, Fault, NotApplicable, NotRun, sentence
from opgraft.diagnostics.conform.lab.inductor import compiled, written_views

KIND = "functional-copy"


def check(bench: Bench) -> Iterator[Fault]:
    if not bench.facts.written:
        raise NotApplicable("the op writes no argument")
    for case in bench.usable(iter(bench.cases[:1])):
        made = compiled(bench, case, "inductor", neighbours=True)
        if made.error is not None:
            raise NotRun(f"the op could not be compiled: {sentence(made.error)}")
        size, where = made.functional_bytes, "an argument"
        if not size:
            size, where = written_views(bench, case), "an argument that is a part of a larger workspace"
        if size:
            yield Fault(
                f"{bench.name}: {where}, {size} bytes, is copied before the op writes it",
                case,
                severity="note",
            )
            return
