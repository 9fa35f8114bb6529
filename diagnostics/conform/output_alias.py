"""A result shares memory with an argument or with another result.

**What it means.** The kernel returns one of its arguments, a view of one, or two views of one buffer.

**Why it matters.** The compiler takes every result for fresh memory: a later write to one shows in the other, or does
not, depending on what was fused. torch 2.13 warns about it and newer ones refuse it.

Fails::

    def halves(x):
        packed = x.sort().values
        return packed[:4], packed[4:]

Passes::

    def halves(x):
        packed = x.sort().values
        return packed[:4].clone(), packed[4:].clone()

**Remedies.** ``return-fresh``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from opgraft.diagnostics import _compat
from opgraft.diagnostics.conform.lab.bench import Bench, Fault, NotApplicable
from opgraft.diagnostics.conform.lab.case import Case
from opgraft.diagnostics.conform.lab.fakes import shares
from opgraft.diagnostics.conform.lab.tree import tensors

KIND = "output-alias"
WORDS = ("alias", "must not also be an input")


def aliased(bench: Bench, case: Case, function: Any = None) -> str:
    """Who shares memory with whom after this call; ``""`` where every result is fresh."""
    result = bench.real(case, function=function)
    if not result.ok:
        return ""
    given, results = tensors((result.args, result.kwargs)), tensors(result.outputs)
    for index, out in enumerate(results):
        if out.numel() == 0:
            continue
        name = f"result {index}" if len(results) > 1 else "the result"
        other = shares(out, given)
        if other is not None:
            return f"{name} shares the memory of argument {other}"
        twin = shares(out, [other_out for other_out in results[:index] if other_out.numel()])
        if twin is not None:
            return f"{name} shares the memory of result {twin}"
    return ""


def check(bench: Bench) -> Iterator[Fault]:
    if bench.facts.returns_alias:
        raise NotApplicable("the schema says that a result is an argument")
    if bench.facts.is_composite:
        raise NotApplicable("a composite op may return views")
    for case in bench.usable(iter(bench.cases)):
        words = aliased(bench, case)
        if not words:
            result = bench.real(case)
            # torch itself refuses the call: ask the kernel behind it who shares what.
            if not result.ok and any(word in str(result.error) for word in WORDS):
                kernel = _compat.python_kernel(bench.op)
                words = (kernel is not None and aliased(bench, case, kernel)) or str(result.error).splitlines()[0]
        if words:
            yield Fault(f"{bench.name}: {words}", case, evidence=(bench.facts.schema,))
            return
