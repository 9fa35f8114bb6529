"""The schema declares writes that never happen.

**What it means.** An argument is marked as written (``mutates_args="unknown"``, or ``Tensor(a!)``), and no call of the
op changed it.

**Why it matters.** The compiler copies what it must keep, orders the call against every reader, and gives the op no
gradient.

Fails::

    @torch.library.custom_op("mylib::double", mutates_args="unknown")
    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

Passes, with ``mutates_args=()``.

**Remedies.** ``declare-mutation``: declare what is really written.
"""

from __future__ import annotations

from collections.abc import Iterator

from opgraft.diagnostics.conform.lab.bench import Bench, Fault, NotApplicable
from opgraft.diagnostics.conform.lab.tree import tensors
from opgraft.diagnostics.conform.undeclared_mutation import named, written

KIND = "overdeclared-mutation"


def check(bench: Bench) -> Iterator[Fault]:
    declared = set(bench.facts.written)
    if not declared:
        raise NotApplicable("the schema declares no writes")
    seen: set[str] = set()
    tried: set[str] = set()
    for case in bench.usable(iter(bench.cases)):
        changed = written(bench, case)
        if changed is None:
            continue
        seen |= changed
        given = named(bench.facts, case.args, case.kwargs)
        tried |= {name for name in declared if any(tensor.numel() for tensor in tensors(given.get(name)))}
    never = sorted((declared & tried) - seen)
    # One call may write the values that were there. A result is what makes a write unlikely to be the purpose.
    if never and (bench.facts.returns or len(never) < len(declared)):
        yield Fault(
            f"{bench.name} is declared to write {' and '.join(never)}, and did not in any call",
            bench.cases[0],
            evidence=(bench.facts.schema,),
            severity="note" if bench.recorded else "warning",
        )
