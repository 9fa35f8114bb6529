"""The kernel writes an argument that the schema calls read-only.

**What it means.** After the call an argument holds other values, and the schema does not say so.

**Why it matters.** The compiler drops, merges and reorders calls by the schema. What the kernel wrote is lost or stale
then, without any error.

Fails::

    @torch.library.custom_op("mylib::count", mutates_args=())
    def count(x: torch.Tensor, total: torch.Tensor) -> None:
        total.add_(x.sum())

Passes::

    @torch.library.custom_op("mylib::count", mutates_args=("total",))
    def count(x: torch.Tensor, total: torch.Tensor) -> None:
        total.add_(x.sum())

**Remedies.** ``declare-mutation``, or ``make-functional``: return the new value.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

import torch

from opgraft.diagnostics.conform.lab import vary
from opgraft.diagnostics.conform.lab.bench import Bench, Fault
from opgraft.diagnostics.conform.lab.case import Case
from opgraft.diagnostics.conform.lab.facts import OpFacts
from opgraft.diagnostics.conform.lab.memory import fresh_call
from opgraft.diagnostics.conform.lab.tree import tensors

KIND = "undeclared-mutation"


def _same(left: torch.Tensor, right: torch.Tensor) -> bool:
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    if left.numel() == 0 or left.layout != torch.strided:
        return True
    if left.is_quantized:
        return torch.equal(left, right)
    equal = left == right
    if left.dtype.is_floating_point or left.dtype.is_complex:
        equal = equal | ((left != left) & (right != right))
    return bool(equal.all())


def named(facts: OpFacts, case_args: tuple[object, ...], case_kwargs: dict[str, object]) -> dict[str, object]:
    """The arguments of a call by name."""
    positional = [argument.name for argument in facts.arguments if not argument.keyword]
    return {**dict(zip(positional, case_args, strict=False)), **case_kwargs}


def written(bench: Bench, case: Case) -> set[str] | None:
    """The names of the arguments that the call changed; None where the op refused it."""
    before_args, before_kwargs = fresh_call(case, requires_grad=False)
    result = bench.real(case)
    if not result.ok and not tensors((result.args, result.kwargs)):
        return None
    before = named(bench.facts, before_args, before_kwargs)
    after = named(bench.facts, result.args, result.kwargs)
    changed = set()
    for name, value in before.items():
        pairs = zip(tensors(value), tensors(after.get(name)), strict=False)
        if not all(_same(old, new) for old, new in pairs):
            changed.add(name)
    return changed if result.ok or changed else None


def check(bench: Bench) -> Iterator[Fault]:
    declared = set(bench.facts.written)
    for base in bench.cases:
        others = () if bench.recorded else (*vary.layouts(base),)
        for case in bench.usable(chain((base,), others)):
            changed = written(bench, case)
            hidden = sorted((changed or set()) - declared)
            if not hidden:
                continue
            small = bench.shrink(case, lambda tried: bool((written(bench, tried) or set()) - declared))
            names = " and ".join(hidden)
            yield Fault(
                f"{bench.name} writes its argument {names}, and the schema does not say so",
                small,
                evidence=(bench.facts.schema,),
                remedies=("declare-mutation", "make-functional"),
            )
            return
