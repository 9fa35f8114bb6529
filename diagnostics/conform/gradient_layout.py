"""The backward assumes a dense incoming gradient.

**What it means.** The gradient that reaches the backward formula is expanded, transposed or a slice of a larger one,
and the formula reads it as contiguous.

**Why it matters.** ``y.sum()`` sends an expanded gradient, ``torch.cat`` a slice. The gradients are wrong then, and
nothing is said.

Fails: a backward kernel that takes ``grad.data_ptr()``. Passes: the same behind ``grad = grad.contiguous()``.

**Remedies.** ``fix-autograd``.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from opgraft.diagnostics.conform.lab.bench import Bench, Fault, NotApplicable, sentence
from opgraft.diagnostics.conform.lab.gradients import Cotangent, gradients, steady
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
            found, error = gradients(bench, case, layout)
            if error is not None:
                off = f"fails: {sentence(error)}"
            else:
                off = bench.disagree(straight, found, case)
                off = f"gives another gradient: {off}" if off else ""
            if off:
                yield Fault(
                    f"{bench.name}: the backward reads its incoming gradient as dense; with one that is {words} it {off}",
                    case,
                    evidence=("the same incoming gradient made contiguous: right",),
                    tail="{call}.sum().backward()",
                )
                return
