"""The op conforms, and the compiled result is wrong, or the compiler fails.

**What it means.** Eager and compiled results differ by more than rounding, or the compile ends in an error, though
fake, schema and kernel agree.

**Why it matters.** Nothing in the kernel can mend it; knowing that saves the search.

Fails: a call that the compiler mistranslates. Passes: the statement written in another way.

**Remedies.** ``update-torch``, ``work-around``. A fault that ``aot_eager`` shows too lies in functionalisation or in
the op; one that only Inductor shows lies in its code.
"""

from __future__ import annotations

from collections.abc import Iterator

from opgraft.diagnostics.conform.lab.bench import Bench, Fault, sentence
from opgraft.diagnostics.conform.lab.inductor import compiled
from opgraft.diagnostics.conform.missing_fake import lacks_fake

KIND = "compiler-bug"


def check(bench: Bench) -> Iterator[Fault]:
    for backend in ("aot_eager", "inductor"):
        for case in bench.usable(iter(bench.cases[:1])):
            made = compiled(bench, case, backend, neighbours=True)
            if made.error is not None:
                text = str(made.error)
                if lacks_fake(made.error) or "DynamicOutputShape" in text or "data-dependent" in text.lower():
                    return
                yield Fault(f"{bench.name} cannot be compiled with {backend}: {sentence(made.error)}", case)
                return
            words = bench.disagree(made.outputs, made.wanted, case)
            if words:
                yield Fault(f"{bench.name} gives other values compiled with {backend}: {words}", case)
                return
