"""The kernel reads a strided or offset view as if it were dense.

**What it means.** With the same values in another layout the op returns other numbers; or its own check refuses, in a
compiled model, a layout that the compiler is free to choose.

**Why it matters.** The numbers are wrong without an error, and the compiler picks layouts by itself: channels last
behind a convolution, padded rows, views of a larger buffer.

Fails: ``kernel(x.data_ptr(), x.numel())``. Passes: the same behind ``x = x.contiguous()``.

**Remedies.** ``honour-strides``; ``set-layout-tag``, which does not reach an op that a compiler pass inserted.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from opgraft.diagnostics.conform.lab import vary
from opgraft.diagnostics.conform.lab.bench import Bench, Fault, NotApplicable, refuses, sentence
from opgraft.diagnostics.conform.lab.case import Case, describe

KIND = "layout-assumed"
# Quantized and opaque tensors, and those of one element, lie in one way only.
ONE_LAYOUT = "no argument has another layout"
FAR_ELEMENTS = 2**31 - 2**21


def reaches_far(case: Case) -> bool:
    """Does a view of this call span more elements or bytes than 32 bits count?"""
    from opgraft.diagnostics.conform.lab.tree import is_plain, span

    return any(is_plain(t) and (t.storage_offset() + span(t)) * t.element_size() >= FAR_ELEMENTS for t in case.tensors)


def is_dense(case: Case) -> bool:
    return all(tensor.is_contiguous() for tensor in case.tensors if tensor.layout.__str__() == "torch.strided")


def against_dense(bench: Bench, case: Case) -> str:
    """In what the call differs from the one with contiguous tensors of the same values."""
    straight = vary.dense(case)
    left, right = bench.real(case), bench.real(straight)
    if not right.ok or not left.ok:
        return ""
    again = bench.real(straight)
    if bench.differ(right, again, case):
        return ""  # not repeatable: another check's subject
    return bench.differ(left, right, case)


def refusal(bench: Bench, case: Case) -> str:
    """The error with which the op refuses this layout, where it takes the same values contiguous."""
    result = bench.real(case)
    return sentence(result.error) if not result.ok and bench.real(vary.dense(case)).ok else ""


def check(bench: Bench) -> Iterator[Fault]:
    if bench.facts.is_composite:
        raise NotApplicable("a composite op is made of others, which are asked themselves")
    tried = False
    for base in bench.cases:
        strided = [] if is_dense(base) or reaches_far(base) else [base]
        others = () if bench.recorded and bench.facts.written else vary.layouts(vary.dense(base))
        if reaches_far(base):
            continue
        for case in bench.usable(chain(strided, others, vary.expansions(base) if not bench.facts.written else ())):
            tried = True
            met = not bench.recorded or case is base
            words = against_dense(bench, case)
            if words:
                small = bench.shrink(case, lambda tried: not is_dense(tried) and bool(against_dense(bench, tried)))
                does = "reads or writes" if bench.facts.written else "reads"
                yield Fault(
                    f"{bench.name} {does} a strided view as if it were dense: {against_dense(bench, small) or words}",
                    small,
                    evidence=(f"called with {describe(small)}", "the same values made contiguous: right"),
                    remedies=("honour-strides", "set-layout-tag"),
                    severity="error" if met else "note",
                )
                return
            refused = refusal(bench, case)
            if refused and ((case is base and bench.recorded) or bench.facts.tagged("flexible_layout")):
                yield Fault(
                    f"{bench.name} refuses a layout that the compiler may hand it: {refused}",
                    case,
                    evidence=(f"called with {describe(case)}", "the same values made contiguous: accepted"),
                    remedies=("set-layout-tag", "honour-strides"),
                    severity="error" if met else "warning",
                )
                return
            result = bench.real(case)
            if not result.ok and not refuses(result.error) and bench.real(vary.dense(case)).ok:
                yield Fault(
                    f"{bench.name} fails on a strided view: {sentence(result.error)}",
                    case,
                    remedies=("honour-strides", "set-layout-tag"),
                    severity="error" if met else "note",
                )
                return
    if not tried and not bench.recorded:
        raise NotApplicable(ONE_LAYOUT)
