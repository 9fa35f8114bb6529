"""Gradients of one call for a given incoming gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from opgraft.diagnostics.conform.lab.bench import Bench, Result
from opgraft.diagnostics.conform.lab.case import Case
from opgraft.diagnostics.conform.lab.tree import tensors

Cotangent = Callable[[torch.Tensor], torch.Tensor]


def steady(like: torch.Tensor, seed: int = 1) -> torch.Tensor:
    """A contiguous incoming gradient that is always the same."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(like.shape, generator=generator, dtype=torch.float64).to(like.dtype).to(like.device)


def gradients(
    bench: Bench, case: Case, cotangent: Cotangent = steady, function: Any = None, only: int | None = None
) -> tuple[list[torch.Tensor | None], BaseException | None]:
    """The gradients of every input that requires grad, or the error of forward or backward.

    Args:
        cotangent: makes the incoming gradient of a result.
        only: use this result alone in the loss, so that the others' incoming gradients are absent.
    """
    result: Result = bench.real(case, grad=True, function=function)
    if not result.ok:
        return [], result.error
    outputs = [out for out in tensors(result.outputs) if out.requires_grad]
    if only is not None:
        outputs = outputs[only : only + 1]
    inputs = [tensor for tensor in tensors((result.args, result.kwargs)) if tensor.requires_grad and tensor.is_leaf]
    if not outputs or not inputs:
        return [], LookupError("no result requires grad")
    torch.manual_seed(0)
    try:
        with torch.enable_grad():
            found = torch.autograd.grad(outputs, inputs, [cotangent(out) for out in outputs], allow_unused=True)
    except Exception as error:
        return [], error
    return list(found), None
