"""The backward assumes a dense incoming gradient.

**What it means.** The gradient that reaches the backward formula is expanded, transposed or a slice of a larger one,
and the formula reads it as contiguous.

**Why it matters.** ``y.sum()`` sends an expanded gradient, ``torch.cat`` a slice. The gradients are wrong then, and
nothing is said.

Fails: a backward kernel that takes ``grad.data_ptr()``. Passes: the same behind ``grad = grad.contiguous()``.

**Remedies.** ``fix-autograd``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from opgraft.diagnostics.conform.lab import compare
from opgraft.diagnostics.conform.lab.bench import Bench, Fault, NotApplicable, sentence
from opgraft.diagnostics.conform.lab.case import Case
from opgraft.diagnostics.conform.lab.gradients import Cotangent, differentiate, gradients, steady
from opgraft.diagnostics.conform.lab.settle import CALLS
from opgraft.diagnostics.conform.lab.tree import tensors
from opgraft.diagnostics.conform.missing_autograd import lost, requiring

KIND = "gradient-layout"


def expanded(like: torch.Tensor) -> torch.Tensor:
    """As the gradient of a sum: one number, with stride 0 everywhere."""
    return torch.full((), 0.75, dtype=like.dtype, device=like.device).expand(like.shape)


def transposed(like: torch.Tensor) -> torch.Tensor:
    value = steady(like)
    return value.transpose(-1, -2).contiguous().transpose(-1, -2) if like.dim() > 1 else value


def part_of_larger(like: torch.Tensor) -> torch.Tensor:
    """As the gradient of a part of a concatenation: rows that lie further apart than they are long."""
    value = steady(like)
    if like.dim() == 0:
        return value
    wide = torch.full((*like.shape[:-1], 2 * like.shape[-1] + 1), 7.0, dtype=like.dtype, device=like.device)
    view = wide[..., : like.shape[-1]]
    view.copy_(value)
    return view


LAYOUTS: tuple[tuple[str, Cotangent], ...] = (
    ("expanded (stride 0, as from a sum)", expanded),
    ("a part of a larger tensor (as from torch.cat)", part_of_larger),
    ("transposed", transposed),
)


class _Names(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace not in ("aten", "prim", "prims") and func._schema.name not in self.found:
            self.found.append(func._schema.name)
        return func(*args, **(kwargs or {}))


def ops_in_backward(bench: Bench, case: Case) -> list[str]:
    """Custom ops that the backward of this call calls: a fault that they show for its gradient is this one."""
    names = _Names()
    result = bench.real(case, grad=True)
    outputs = [out for out in tensors(result.outputs) if out.requires_grad]
    if not result.ok or not outputs:
        return []
    with contextlib.suppress(Exception), names:
        given = [tensor for tensor in tensors((result.args, result.kwargs)) if tensor.requires_grad and tensor.is_leaf]
        differentiate(outputs, given, [steady(out) for out in outputs])
    return names.found


def _most(value: torch.Tensor) -> float:
    return float(value.abs().double().max())


def is_rounding(
    bench: Bench, case: Case, left: Sequence[torch.Tensor | None], right: Sequence[torch.Tensor | None]
) -> bool:
    """Is all that two gradients differ by rounding beside a gradient of usual size?

    One that a certain incoming gradient makes zero, as a constant one does behind a softmax, has no digits to compare.
    """
    usual, error = gradients(bench, case)
    if error is not None or not len(left) == len(right) == len(usual):
        return False
    terms = compare.terms_of(case.tensors)
    for ours, theirs, size in zip(left, right, usual, strict=True):
        if ours is None or theirs is None or size is None:
            if ours is not theirs:
                return False
            continue
        if ours.numel() and not _most(ours - theirs) <= compare.bound(ours.dtype, terms) * _most(size):
            return False
    return True


def check(bench: Bench) -> Iterator[Fault]:
    asked = [found for case in bench.cases if (found := requiring(bench, case)) is not None]
    if not asked or bench.facts.is_composite:
        raise NotApplicable("no input requires grad")
    for case in bench.usable(iter(asked)):
        if lost(bench, case):
            raise NotApplicable("the op has no gradient")
        for words, layout in LAYOUTS:
            straight, trouble = gradients(bench, case, lambda like, layout=layout: layout(like).contiguous())  # type: ignore[misc]
            if trouble is not None:
                continue
            gradient, error = gradients(bench, case, layout)
            if error is not None:
                off = f"fails: {sentence(error)}"
            else:
                differs = bench.disagree(straight, gradient, case)
                if differs and is_rounding(bench, case, straight, gradient):
                    continue
                off = f"gives another gradient: {differs}" if differs else ""
            if off:
                inner = ops_in_backward(bench, case)
                yield Fault(
                    f"{bench.name}: the backward reads its incoming gradient as dense; with one that is {words} "
                    f"it {off}",
                    case,
                    evidence=(
                        "the same incoming gradient made contiguous: right",
                        *(f"{CALLS} {name}" for name in inner),
                    ),
                )
                return
