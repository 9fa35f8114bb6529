"""The formula disagrees with finite differences, or with the reference's gradient.

**What it means.** In float64, or in float32 where the op takes nothing wider, the gradient differs from
(f(x+h) - f(x-h)) / 2h; or from that of the reference; or it depends on which inputs ask for one; or it has another
dtype than its input; or the formula cannot do without the incoming gradient of an unused result.

**Why it matters.** Training goes somewhere else, without an error.

Fails: ``return grad * x`` for x squared. Passes: ``return 2 * grad * x``.

**Remedies.** ``fix-autograd``. A gradient that is meant to differ (a straight-through estimator) is declared:
``opgraft.describe(op, reference, surrogate=True)``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from opgraft.diagnostics.conform.lab.bench import Bench, Fault, NotApplicable, sentence
from opgraft.diagnostics.conform.lab.case import Case
from opgraft.diagnostics.conform.lab.double import in_double
from opgraft.diagnostics.conform.lab.gradients import backward, gradients, steady
from opgraft.diagnostics.conform.lab.tree import map_tensors, tensors
from opgraft.diagnostics.conform.lab.witness import TAILS
from opgraft.diagnostics.conform.missing_autograd import lost, requiring

KIND = "wrong-gradient"


@dataclass(frozen=True)
class Precision:
    """How a derivative is estimated in one dtype: the step, by how much two estimates may differ to count, and by how
    much of the larger the formula may be off.

    The error of a central difference is of the order step^2 + eps / step (Press et al., Numerical Recipes, 5.7), least
    at the cube root of eps; single points on a kink add to it, the more the longer the step."""

    dtype: torch.dtype
    step: float
    spread: float
    tolerance: float


DOUBLE = Precision(torch.float64, step=1e-6, spread=1e-3, tolerance=1e-3)
# Many a kernel takes float32 alone: a formula that is off by a factor shows there as well.
SINGLE = Precision(torch.float32, step=5e-3, spread=2e-2, tolerance=1e-1)


def directional(bench: Bench, case: Case) -> str:
    """Compares the gradient along a random direction with a central difference, in float64 where the op takes it.

    Not where arguments follow from others: a step along one of them alone leaves the calls that there can be."""
    if bench.facts.spec is not None and bench.facts.spec.derived:
        return ""
    wide = in_double(bench, case)
    words = None if wide is None else along(bench, wide, DOUBLE)
    if words is None:
        words = along(bench, case, SINGLE)
    return words or ""


def along(bench: Bench, case: Case, precision: Precision) -> str | None:
    """In what gradient and difference disagree, ``""`` where they agree; None where this dtype cannot tell."""
    if any(tensor.requires_grad and tensor.dtype != precision.dtype for tensor in case.tensors):
        return None
    made = backward(bench, case)
    if made.error is not None:
        return None
    found = made.gradients
    # A result that the formula marks as not differentiable moves with the input and has no part in the gradient.
    counted = [out.requires_grad for out in made.outputs]
    inputs = [tensor for tensor in case.tensors if tensor.requires_grad]
    if len(inputs) != len(found) or not all(g is None or torch.isfinite(g).all() for g in found):
        return ""
    for which, (tensor, gradient) in enumerate(zip(inputs, found, strict=True)):
        if tensor.numel() == 0:
            continue
        estimates = []
        for seed in (1, 2, 3):
            direction = steady(tensor, seed)
            analytic = 0.0 if gradient is None else float((gradient.double() * direction.double()).sum())
            steps = (precision.step, 4 * precision.step)
            numeric = [_difference(bench, case, which, direction, step, counted) for step in steps]
            if any(value is None for value in numeric):
                return ""
            first, second = float(numeric[0] or 0.0), float(numeric[1] or 0.0)
            scale = max(abs(first), abs(analytic), 1e-4)
            # Two steps that disagree mean a kink or rounding, and say nothing about the formula.
            if abs(first - second) > precision.spread * scale:
                continue
            estimates.append((abs(first - analytic) / scale, analytic, first))
        if estimates and min(estimates)[0] > precision.tolerance:
            _, analytic, numeric_value = min(estimates)
            surrogate = " (the value does not move at all: a surrogate would be declared)" if numeric_value == 0 else ""
            return (
                f"gradient of input {which} along a direction is {analytic:.5g}, finite differences "
                f"{'in float32 ' if precision is SINGLE else ''}give {numeric_value:.5g}{surrogate}"
            )
    return ""


def _difference(
    bench: Bench, case: Case, which: int, direction: torch.Tensor, step: float, counted: list[bool]
) -> float | None:
    """The central difference of the sum of the ``counted`` results, weighted as for the gradient."""
    total = []
    for sign in (1.0, -1.0):
        index = -1

        def one(tensor: torch.Tensor, sign: float = sign) -> torch.Tensor:
            nonlocal index
            if not tensor.requires_grad:
                return tensor
            index += 1
            return tensor.detach() + sign * step * direction if index == which else tensor.detach()

        args, kwargs = map_tensors(one, (case.args, case.kwargs))
        result = bench.real(case.varied(case.change, case.label, args, kwargs))
        if not result.ok:
            return None
        outputs = [out for out, counts in zip(tensors(result.outputs), counted, strict=False) if counts]
        total.append(sum(float((out.double() * steady(out).double()).sum()) for out in outputs))
    return (total[0] - total[1]) / (2 * step)


def against_reference(bench: Bench, case: Case) -> str:
    """Compares the gradients with those of the reference, in the dtype of the call."""
    spec = bench.facts.spec
    if spec is None or spec.surrogate or spec.reference is spec.op:
        return ""
    ours, error = gradients(bench, case)
    theirs, trouble = gradients(bench, case, function=spec.reference)
    if error is not None or trouble is not None:
        return ""
    left, right = [], []
    for a, b in zip(ours, theirs, strict=False):
        # A gradient that is absent is zero.
        like = a if a is not None else b
        if like is not None:
            left.append(a if a is not None else torch.zeros_like(like))
            right.append(b if b is not None else torch.zeros_like(like))
    words = bench.disagree(left, right, case)
    return f"gradient differs from the reference's: {words}" if words else ""


def habits(bench: Bench, case: Case) -> str:
    """Gradient dtype, ``needs_input_grad``, and results that the loss does not use."""
    made = backward(bench, case)
    full, error = made.gradients, made.error
    if not made.ran:
        return ""
    if isinstance(error, LookupError):
        return ""  # no result is differentiable
    if error is not None:
        return f"backward fails: {sentence(error)}"
    inputs = [tensor for tensor in case.tensors if tensor.requires_grad]
    for tensor, gradient in zip(inputs, full, strict=False):
        if gradient is not None and (gradient.dtype != tensor.dtype or gradient.shape != tensor.shape):
            return f"gradient is {gradient.dtype}{tuple(gradient.shape)}, its input {tensor.dtype}{tuple(tensor.shape)}"
    if len(inputs) > 1:
        for keep in range(len(inputs)):
            index = -1

            def one(tensor: torch.Tensor, keep: int = keep) -> torch.Tensor:
                nonlocal index
                if not tensor.requires_grad:
                    return tensor
                index += 1
                return tensor if index == keep else tensor.detach()

            args, kwargs = map_tensors(one, (case.args, case.kwargs))
            alone, trouble = gradients(bench, case.varied("grad", f"only input {keep} requires grad", args, kwargs))
            if isinstance(trouble, LookupError):
                continue
            if trouble is not None:
                return f"backward fails when only input {keep} requires grad: {sentence(trouble)}"
            if alone[0] is not None and full[keep] is not None and bench.disagree(alone, [full[keep]], case):
                return f"gradient of input {keep} changes when the others require none"
    outputs = [out for out in made.outputs if out.requires_grad]
    if len(outputs) > 1:
        for only in range(len(outputs)):
            _, trouble = gradients(bench, case, only=only)
            if trouble is not None:
                return f"backward fails when only result {only} is used: {sentence(trouble)}"
    return ""


def check(bench: Bench) -> Iterator[Fault]:
    asked = [found for case in bench.cases if (found := requiring(bench, case)) is not None]
    if not asked or bench.facts.is_composite:
        raise NotApplicable("no input requires grad")
    if bench.facts.spec is not None and bench.facts.spec.surrogate:
        raise NotApplicable("the gradient is declared to be a surrogate")
    for case in bench.usable(iter(asked)):
        if lost(bench, case):
            raise NotApplicable("the op has no gradient")
        words = habits(bench, case) or directional(bench, case) or against_reference(bench, case)
        if words:
            small = bench.shrink(case, lambda tried: bool(habits(bench, tried) or directional(bench, tried)))
            narrow = " in float32" if "finite differences in float32" in words else ""
            tail = TAILS[f"finite-differences{narrow}"] if "finite differences" in words else ""
            yield Fault(f"{bench.name}: {words}", small, tail=tail)
            return
