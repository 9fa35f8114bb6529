"""The op disagrees with its reference.

**What it means.** Beside a float64 reference, the error of the op is larger than rounding explains, at some size,
dtype or stride, in eager already.

**Why it matters.** The kernel is wrong; everything built on it is.

Fails: a reduction whose tail is left out. Passes: the same with a tail.

**Remedies.** ``fix-kernel``. The bound is 32 eps sqrt(n) of the largest value, n the elements of the largest input, or
ten times the reference's own error in the op's dtype, whichever is larger.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

import torch

from opgraft.diagnostics.conform.lab import compare, vary
from opgraft.diagnostics.conform.lab.bench import Bench, Fault, NotApplicable, Result, refuses, sentence
from opgraft.diagnostics.conform.lab.case import Case, describe
from opgraft.diagnostics.conform.lab.double import FAR, apart
from opgraft.diagnostics.conform.lab.tree import leaves
from opgraft.diagnostics.conform.missing_kernel import in_dtype

KIND = "wrong-value"
DOUBLE = """\
single = torch.utils._pytree.tree_leaves({call})
double = torch.utils._pytree.tree_leaves((lambda {names}: {call})({wide}))
for near, far in zip(single, double):
    torch.testing.assert_close(near.double(), far.double(), rtol=1e-2, atol=1e-2)"""


def reference(bench: Bench, case: Case, wide: bool) -> Result:
    """The reference on the same arguments; in float64 with ``wide``."""
    assert bench.facts.spec is not None
    given = vary.recast(case, torch.float64) or case if wide else case
    return bench.real(given, function=bench.facts.spec.reference)


def told(bench: Bench, result: Result) -> list[object]:
    """What a call has to say: its results, and the arguments that the schema says it writes."""
    given = dict(zip((argument.name for argument in bench.facts.arguments), result.args, strict=False)) | result.kwargs
    return [*leaves(result.outputs), *(leaf for name in bench.facts.written for leaf in leaves(given.get(name)))]


def trial(bench: Bench, case: Case) -> str:
    """In what the op differs from its reference; ``""`` where the difference is rounding, or the op refuses."""
    result = bench.real(case)
    exact = reference(bench, case, wide=True)
    if not exact.ok:
        return ""
    if not result.ok:
        return "" if refuses(result.error) else f"fails where the reference does not: {sentence(result.error)}"
    own = reference(bench, case, wide=False)
    ours, theirs = told(bench, result), told(bench, exact)
    if len(ours) != len(theirs):
        return f"returns {len(ours)} results, the reference {len(theirs)}"
    native = told(bench, own) if own.ok else [None] * len(theirs)
    for out, wanted, near in zip(ours, theirs, native, strict=True):
        if not isinstance(out, torch.Tensor) or not isinstance(wanted, torch.Tensor):
            continue
        if out.shape != wanted.shape:
            return f"has shape {tuple(out.shape)}, the reference {tuple(wanted.shape)}"
        off = compare.difference(out, wanted)
        room = compare.bound(out.dtype, compare.terms_of(case.tensors))
        if isinstance(near, torch.Tensor) and near.dtype == out.dtype:
            room = max(room, 10 * compare.difference(near, wanted))
        if off > room:
            return f"is off by {off:.2g} of the largest value (rounding explains {room:.1g})"
    return ""


def against_double(bench: Bench, case: Case) -> str | None:
    """In what the op in float64 differs from the op in float32 on the same values, far beyond rounding; None where it
    does not take both.

    Without a reference that is what can be said of values: float64 holds every float32 number, and an op that takes it
    as well computes the same with more digits.
    """
    if not any(tensor.dtype == torch.float32 for tensor in case.tensors):
        return None
    wide = vary.recast(case, torch.float64)
    narrow = bench.real(case)
    if wide is None or not narrow.ok:
        return None
    result = bench.real(wide)
    if not result.ok:
        return None
    off = apart(narrow.outputs, result.outputs)
    if off <= FAR:
        return ""
    again = bench.real(wide)
    if again.ok and bench.disagree(again.outputs, result.outputs, wide):
        return ""
    return f"gives other numbers in float64 than in float32 ({off:.2g} of the largest)"


def check(bench: Bench) -> Iterator[Fault]:
    spec = bench.facts.spec
    if spec is None or spec.reference is spec.op:
        if bench.recorded or bench.facts.tagged("nondeterministic_seeded") or bench.facts.is_composite:
            raise NotApplicable("no reference is known: opgraft.describe(op, reference) gives one")
        compared = False
        for case in bench.usable(iter(bench.cases)):
            words = against_double(bench, case)
            compared = compared or words is not None
            if words:
                small = bench.shrink(case, lambda tried: bool(against_double(bench, tried)))
                yield Fault(f"{bench.name} {words}", small, evidence=(f"called with {describe(small)}",), tail=DOUBLE)
                return
        agrees = "; float64 agrees with float32" if compared else ""
        raise NotApplicable(f"no reference is known: opgraft.describe(op, reference) gives one{agrees}")
    for base in bench.cases:
        dtypes = [found for dtype in spec.dtypes if (found := in_dtype(bench, base, dtype)) is not None]
        # Rows that are cut down do not have what was kept of the whole ones.
        sizes = () if spec.derived else vary.sizes(base)
        for case in bench.usable(chain((base,), dtypes, sizes, vary.layouts(base))):
            # An index past the end has no value to agree on, and on a GPU torch's own assertion, in the reference,
            # takes the device down.
            if case.loose and bench.device.type == "cuda":
                continue
            words = trial(bench, case)
            if words:
                small = case if spec.derived else bench.shrink(case, lambda tried: bool(trial(bench, tried)))
                yield Fault(
                    f"{bench.name} {trial(bench, small) or words}", small, evidence=(f"called with {describe(small)}",)
                )
                return
