"""Gradients of one call for a given incoming gradient."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Backward:
    """A call and its backward: the results of the op, whose gradients, and the error of the one or the other.

    ``ran`` says that the op itself took the call.
    """

    outputs: tuple[torch.Tensor, ...] = ()
    gradients: tuple[torch.Tensor | None, ...] = ()
    error: BaseException | None = None
    ran: bool = True


def backward(
    bench: Bench, case: Case, cotangent: Cotangent = steady, function: Any = None, only: int | None = None
) -> Backward:
    """Calls the op and differentiates it by every input that requires grad.

    Args:
        cotangent: makes the incoming gradient of a result.
        only: use this result alone in the loss, so that the others' incoming gradients are absent.
    """
    result: Result = bench.real(case, grad=True, function=function)
    if not result.ok:
        return Backward(error=result.error, ran=False)
    made = tuple(tensors(result.outputs))
    outputs = [out for out in made if out.requires_grad]
    if only is not None:
        outputs = outputs[only : only + 1]
    inputs = [tensor for tensor in tensors((result.args, result.kwargs)) if tensor.requires_grad and tensor.is_leaf]
    if not outputs or not inputs:
        return Backward(made, error=LookupError("no result requires grad"))
    torch.manual_seed(0)
    try:
        with torch.enable_grad():
            found = differentiate(outputs, inputs, [cotangent(out) for out in outputs])
    except Exception as error:
        return Backward(made, error=error)
    return Backward(made, tuple(found))


def gradients(
    bench: Bench, case: Case, cotangent: Cotangent = steady, function: Any = None, only: int | None = None
) -> tuple[list[torch.Tensor | None], BaseException | None]:
    """The gradients of every input that requires grad, or the error of forward or backward; see ``backward``."""
    made = backward(bench, case, cotangent, function, only)
    return list(made.gradients), made.error


def no_engine(error: BaseException) -> bool:
    """torch's error about backwards in a fork of a process that has run one (builds with CUDA)."""
    return "fork-based multiprocessing" in str(error)


def differentiate(
    outputs: list[torch.Tensor], inputs: list[torch.Tensor], cotangents: list[torch.Tensor]
) -> list[torch.Tensor | None]:
    """Gradients by torch's engine; where a fork may not use it, by calling the op's own backward node."""
    try:
        return list(torch.autograd.grad(outputs, inputs, cotangents, allow_unused=True))
    except RuntimeError as error:
        if not no_engine(error):
            raise
    return by_hand(outputs, inputs, cotangents)


def by_hand(
    outputs: list[torch.Tensor], inputs: list[torch.Tensor], cotangents: list[torch.Tensor], create_graph: bool = False
) -> list[torch.Tensor | None]:
    """Gradients by calling the op's own backward node; with ``create_graph`` they remember how they were made."""
    node: Any = outputs[0].grad_fn
    given: list[torch.Tensor | None] = [None] * (1 + max(out.output_nr for out in outputs))
    for out, cotangent in zip(outputs, cotangents, strict=True):
        given[out.output_nr] = cotangent
    # A Python function's node has apply, one of C++ is called; the former also answers for what is no tensor.
    call = node.apply if hasattr(node, "apply") else node
    with torch.set_grad_enabled(create_graph):
        made = call(*given)
    entries = list(made) if isinstance(made, tuple) else [made]
    found: dict[int, torch.Tensor | None] = {}
    slots = [follower for follower, _ in node.next_functions]
    for index, follower in enumerate(slots):
        while entries and entries[0] is None and len(entries) > len(slots) - index:
            entries.pop(0)
        gradient = entries.pop(0) if entries else None
        variable = getattr(follower, "variable", None)
        if variable is not None:
            found[id(variable)] = gradient
    return [_fitted(found.get(id(tensor)), tensor) for tensor in inputs]


def _fitted(gradient: torch.Tensor | None, tensor: torch.Tensor) -> torch.Tensor | None:
    """As the engine does: in the input's dtype, summed over what was broadcast."""
    if gradient is None:
        return None
    fitted = gradient.sum_to_size(tensor.shape) if gradient.shape != tensor.shape else gradient
    return fitted.to(tensor.dtype)
