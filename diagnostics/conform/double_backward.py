"""The second derivative is silently wrong, or beyond what the formula does.

**What it means.** The gradient of the gradient differs from finite differences of the gradient, and no error is raised.

**Why it matters.** A gradient penalty, a force in a loss or a meta-learner differentiates twice. A formula that runs
under ``no_grad``, or that calls a kernel without a gradient of its own, gives zero for a part of it.

Fails::

    def backward(ctx, grad):
        with torch.no_grad():
            return grad * ctx.saved_tensors[0]

Passes: the same without ``no_grad``, or with ``torch.autograd.function.once_differentiable``, which refuses.

**Remedies.** ``fix-autograd``; ``compile-inner-gradient`` and ``keep-eager`` where torch's compiler is the limit.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from opgraft.diagnostics.conform.lab.bench import Bench, Fault, NotApplicable, NotRun, sentence
from opgraft.diagnostics.conform.lab.case import Case
from opgraft.diagnostics.conform.lab.double import in_double
from opgraft.diagnostics.conform.lab.gradients import by_hand, gradients, no_engine, steady
from opgraft.diagnostics.conform.lab.tree import map_tensors, tensors
from opgraft.diagnostics.conform.missing_autograd import lost, requiring

KIND = "double-backward"
STEP = 1e-5
TOLERANCE = 1e-3


def second(bench: Bench, case: Case) -> tuple[str, BaseException | None]:
    """Compares d/dx <g(x), v> along a direction with a difference of g; ``("", error)`` where it is refused."""
    wide = in_double(bench, case)
    if wide is None:
        return "", None
    inputs = [tensor for tensor in wide.tensors if tensor.requires_grad]
    if any(tensor.dtype != torch.float64 for tensor in inputs):
        return "", None
    result = bench.real(wide, grad=True)
    outputs = [out for out in tensors(result.outputs) if out.requires_grad]
    leaf = [tensor for tensor in tensors((result.args, result.kwargs)) if tensor.requires_grad and tensor.is_leaf]
    if not result.ok or not outputs or not leaf:
        return "", None
    found: tuple[torch.Tensor | None, ...] = tuple(None for _ in leaf)
    try:
        with torch.enable_grad():
            cotangents = [steady(out) for out in outputs]
            first = torch.autograd.grad(outputs, leaf, cotangents, create_graph=True, allow_unused=True)
            probe = [(value * steady(value, 5)).sum() for value in first if value is not None]
            total = sum(probe, torch.zeros((), dtype=torch.float64))
            if total.requires_grad:
                found = torch.autograd.grad(total, leaf, allow_unused=True)
    except Exception as error:
        if not no_engine(error):
            return "", error
        alone = by_hand(outputs, leaf, [steady(out) for out in outputs], create_graph=True)
        if any(value is not None and value.requires_grad for value in alone):
            raise NotRun("torch runs no second backward in a fork of a process that has run a first one") from error
        # Nothing of the first gradient depends on the inputs, as far as torch knows.
        found = tuple(None for _ in leaf)
    for which, tensor in enumerate(leaf):
        direction = steady(tensor, 9)
        gradient = found[which]
        analytic = 0.0 if gradient is None else float((gradient * direction).sum())
        numeric = [_difference(bench, wide, which, direction, step) for step in (STEP, 3 * STEP)]
        if any(value is None for value in numeric):
            return "", None
        one, other = float(numeric[0] or 0.0), float(numeric[1] or 0.0)
        scale = max(abs(one), abs(analytic), 1e-3)
        if abs(one - other) > TOLERANCE * scale:
            continue
        if abs(one - analytic) > 10 * TOLERANCE * scale:
            return f"second derivative by input {which} is {analytic:.5g}, finite differences give {one:.5g}", None
    return "", None


def _difference(bench: Bench, case: Case, which: int, direction: torch.Tensor, step: float) -> float | None:
    values = []
    for sign in (1.0, -1.0):
        index = -1

        def one(tensor: torch.Tensor, sign: float = sign) -> torch.Tensor:
            nonlocal index
            if not tensor.requires_grad:
                return tensor
            index += 1
            moved = tensor.detach() + sign * step * direction if index == which else tensor.detach()
            return moved.requires_grad_(True)

        args, kwargs = map_tensors(one, (case.args, case.kwargs))
        found, error = gradients(bench, case.varied(case.change, case.label, args, kwargs))
        if error is not None:
            return None
        values.append(sum(float((g * steady(g, 5)).sum()) for g in found if g is not None))
    return (values[0] - values[1]) / (2 * step)


def check(bench: Bench) -> Iterator[Fault]:
    if bench.recorded and "create_graph" not in bench.met:
        raise NotApplicable("the run asked for no second derivative")
    asked = [found for case in bench.cases if (found := requiring(bench, case)) is not None]
    if not asked or bench.facts.is_composite:
        raise NotApplicable("no input requires grad")
    for case in bench.usable(iter(asked)):
        if lost(bench, case):
            raise NotApplicable("the op has no gradient")
        words, refused = second(bench, case)
        if words:
            yield Fault(
                f"{bench.name}: {words}, and nothing is said",
                case,
                remedies=("fix-autograd",),
            )
            return
        if refused is not None and bench.recorded:
            yield Fault(
                f"{bench.name} cannot be differentiated twice, and the run asks for it: {sentence(refused)}",
                case,
                remedies=("fix-autograd",),
            )
            return
