"""Inputs require grad, and the op has no formula.

**What it means.** The result of the op carries no gradient, or the backward ends in torch's error about a missing
formula.

**Why it matters.** In the first case nothing is said: layers before the op stop learning.

Fails: ``Library.define`` with a CPU kernel alone. Passes, with ``torch.library.register_autograd`` beside it. A formula
that calls ``ctx.mark_non_differentiable`` on every result says that there is none to lose: the check does not apply.

**Remedies.** ``add-autograd``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import torch

from opgraft.diagnostics.conform.lab.bench import Bench, Fault, NotApplicable, sentence
from opgraft.diagnostics.conform.lab.case import Case
from opgraft.diagnostics.conform.lab.gradients import differentiate
from opgraft.diagnostics.conform.lab.marks import marked
from opgraft.diagnostics.conform.lab.tree import map_tensors, tensors
from opgraft.diagnostics.model import Severity

KIND = "missing-autograd"
# How torch, and formulas by hand, say that there is no gradient.
WORDS = re.compile(
    r"no autograd formula|autograd kernel was not registered|not implemented for|not differentiable"
    r"|(backwards?|gradients?|derivatives?|autograd|differentiation)\b.{0,40}\bnot\b.{0,20}\b(supported|implemented)",
    re.IGNORECASE,
)


def differentiable(value: torch.Tensor) -> bool:
    return value.dtype.is_floating_point or value.dtype.is_complex


def requiring(bench: Bench, case: Case) -> Case | None:
    """The call with ``requires_grad`` on its floating tensors; as it was recorded where it comes from a run."""
    written = set(bench.facts.written)
    if bench.recorded:
        return case if any(tensor.requires_grad for tensor in case.tensors) else None
    if written or not any(differentiable(tensor) for tensor in case.tensors):
        return None

    def one(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().clone().requires_grad_(True) if differentiable(tensor) else tensor

    args, kwargs = map_tensors(one, (case.args, case.kwargs))
    return case.varied("grad", "requires grad", args, kwargs)


def lost(bench: Bench, case: Case) -> str:
    """How the gradient is lost in this call; ``""`` where it arrives.

    Raises:
        NotApplicable: the formula says that no result has one.
    """
    if not bench.facts.has_autograd:
        # In eager the tape may follow torch ops inside a Python kernel; the compiler sees the op alone.
        results = [out for out in tensors(bench.real(case).outputs) if differentiable(out)]
        return (
            "loses the gradient: it has no autograd formula, and a compiled model gets none through it"
            if results
            else ""
        )
    with marked() as constant:
        result = bench.real(case, grad=True)
    if not result.ok:
        told = WORDS.search(str(result.error)) is not None
        return f"has no autograd formula: {sentence(result.error)}" if told else ""
    results = [out for out in tensors(result.outputs) if differentiable(out)]
    if not results:
        return ""
    if not any(out.requires_grad for out in results):
        if all(any(out is one for one in constant) for out in results):
            raise NotApplicable("the formula marks every result as not differentiable")
        return "loses the gradient: no result requires grad though an input does"
    kept = [out for out in results if out.requires_grad]
    given = [tensor for tensor in tensors((result.args, result.kwargs)) if tensor.requires_grad and tensor.is_leaf]
    try:
        differentiate(kept, given, [torch.ones_like(out) for out in kept])
    except Exception as error:
        if WORDS.search(str(error)):
            return "has no autograd formula: the backward ends in an error"
        return ""
    return ""


def check(bench: Bench) -> Iterator[Fault]:
    if bench.facts.is_composite:
        raise NotApplicable("a composite op is differentiated through its parts")
    asked = [found for case in bench.cases if (found := requiring(bench, case)) is not None]
    if not asked:
        raise NotApplicable("no input requires grad" if bench.recorded else "no floating input that is only read")
    for case in bench.usable(iter(asked)):
        words = lost(bench, case)
        if words:
            met = "backward" in bench.met
            quiet = words.startswith("loses")
            severity: Severity = "error" if (bench.recorded and met) or (quiet and not bench.recorded) else "warning"
            yield Fault(
                f"{bench.name} {words}",
                case,
                severity="note" if bench.recorded and not met else severity,
            )
            return
