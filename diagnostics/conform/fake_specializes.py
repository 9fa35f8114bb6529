"""The fake, or the schema, turns a size into a constant.

**What it means.** The op accepts any size, yet tracing it with a symbolic size fixes the size to the one that was
seen: an ``int()`` or a comparison in the fake, or an ``int`` in the schema where ``SymInt`` is due.

**Why it matters.** Every new size compiles again, up to the recompile limit; after that the frame runs in eager.

Fails::

    lib.define("head(Tensor x, int rows) -> Tensor")

Passes::

    lib.define("head(Tensor x, SymInt rows) -> Tensor")

**Remedies.** ``use-symint`` in the schema, ``fix-fake`` in the fake.
"""

from __future__ import annotations

from collections.abc import Iterator

from opgraft.diagnostics.conform.lab import vary
from opgraft.diagnostics.conform.lab.bench import Bench, Fault
from opgraft.diagnostics.conform.lab.case import Case, describe, given, taken
from opgraft.diagnostics.conform.lab.facts import Argument
from opgraft.diagnostics.conform.lab.fakes import symbolic_call
from opgraft.diagnostics.conform.lab.tree import tensors
from opgraft.diagnostics.conform.missing_fake import with_fake

KIND = "fake-specializes"


def _accepts_other(bench: Bench, case: Case, size: int) -> Case | None:
    """A call with another extent in place of ``size`` that kernel and fake accept."""
    for new in (size + 1, size + 2, 2 * size):
        other = vary.resized(case, size, new)
        if other is not None and bench.real(other).ok and bench.fake(other).error is None:
            return other
    return None


def _shape(bench: Bench, case: Case) -> list[tuple[int, ...]] | None:
    result = bench.real(case)
    return [tuple(tensor.shape) for tensor in tensors(result.outputs)] if result.ok else None


def size_like(bench: Bench, case: Case, position: int, argument: Argument) -> bool:
    """Does the shape of a result follow this integer, or does the integer have to equal an extent?"""
    values = given(case)
    value = values[position]
    if type(value) is not int or value < 1 or any(word in argument.name for word in ("dim", "axis")):
        return False
    before = _shape(bench, case)
    for other_value in (value + 1, value - 1):
        changed = taken(case, [*values[:position], other_value, *values[position + 1 :]])
        after = _shape(bench, case.varied("number", f"{argument.name} changed", *changed))
        if after is not None and before is not None and after != before:
            # A window or a group count also changes a shape, and the number of a mode its rank; a size gives that very
            # extent, or follows one by a step.
            if [len(shape) for shape in before] != [len(shape) for shape in after]:
                return False
            steps = [b - a for old, new in zip(before, after, strict=False) for a, b in zip(old, new, strict=False)]
            return all(step in (-1, 0, 1) for step in steps)
    if value > 1 and value in vary.extents(case):
        other = vary.resized(case, value, value + 1)
        alone = vary.resized(case, value, value + 1, numbers=False)
        return bool(other and alone and bench.real(other).ok and not bench.real(alone).ok)
    return False


def check(bench: Bench) -> Iterator[Fault]:
    with_fake(bench)
    for base in bench.usable(iter(bench.cases)):
        if bench.fake(base).error is not None or not bench.real(base).ok:
            continue
        result = symbolic_call(bench.op, base)
        for size, constant in result.replaced:
            other = _accepts_other(bench, base, size)
            if other is None:
                continue
            yield Fault(
                f"{bench.name}: the fake turns a size of {constant} into a constant, though the kernel takes others",
                base,
                evidence=(f"traced with {describe(base)}", f"accepted as well: {describe(other)}"),
                remedies=("fix-fake", "use-symint"),
                severity="warning",
            )
            return
        for position, argument in enumerate(bench.facts.in_order(len(base.args), base.kwargs)):
            if not argument.kind.startswith("int") or "[" in argument.kind:
                continue
            if argument.name in bench.met or size_like(bench, base, position, argument):
                yield Fault(
                    f"{bench.name}: {argument.name} is a size, and int in the schema: every value compiles again",
                    base,
                    evidence=(bench.facts.schema,),
                    remedies=("use-symint",),
                    severity="note" if bench.recorded and argument.name not in bench.met else "warning",
                )
                return
