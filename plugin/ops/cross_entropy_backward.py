"""The gradient of cross entropy: from what the forward kept of every row, and together with the loss in one pass."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from opgraft.ops.cross_entropy import (
    FLAGS,
    backward_op,
    check_inputs,
    check_part,
    cost,
    map_rows,
    row_rule,
    samples,
    saved_gradients,
    weight_wanted,
    with_gradient_op,
)
from opgraft.ops.cross_entropy_reference import NONE, reference
from opgraft.ops.registration import bind, bind_backward, shard, vector_jacobian_product
from opgraft.ops.samples import Maker
from opgraft.registry import Cost, OpSpec, Sample, register


def reference_with_gradient(
    logits: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None, *options: Any
) -> tuple[torch.Tensor, ...]:
    """The reference's outputs, and the gradient of its loss for an incoming gradient of one."""
    found = reference(logits, target, weight, *options)
    ones = torch.ones_like(found[0])
    return *found, reference_backward(logits, target, weight, found[2], ones, None, *options).detach()


def reference_backward(
    logits: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    statistics: torch.Tensor,
    grad_loss: torch.Tensor | None,
    grad_lse: torch.Tensor | None,
    *options: Any,
) -> torch.Tensor:
    """The gradient of the reference. The statistics follow from the logits, so they are not looked at."""
    inputs = (logits, target, weight, *options)
    (found, *_) = vector_jacobian_product(reference, inputs, (grad_loss, grad_lse, None))
    return torch.zeros_like(logits).contiguous() if found is None else found.contiguous()


def _backward_fake(
    logits: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    statistics: torch.Tensor,
    grad_loss: torch.Tensor | None,
    grad_lse: torch.Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float,
    reduction: int,
) -> torch.Tensor:
    op = "cross_entropy_backward"
    wide = check_inputs(op, logits, target, weight, label_smoothing)
    rows = tuple(logits.shape[:-1])
    check_part(op, "statistics", statistics, wide, logits, (2, *rows), "two numbers a row")
    if grad_loss is not None:
        shape = rows if reduction == NONE else ()
        check_part(op, "grad_loss", grad_loss, wide, logits, shape, "that of the loss")
    if grad_lse is not None:
        check_part(op, "grad_lse", grad_lse, wide, logits, rows, "one number a row")
    return logits.new_empty(logits.shape)


def _backward_vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
    return map_rows(backward_op, info, in_dims, args, (0,))


def backward_cost(logits: torch.Tensor, target: torch.Tensor, *others: Any) -> Cost:
    """One read of the logits and one write of their gradient; two numbers a row beside it."""
    wide = torch.promote_types(logits.dtype, torch.float32).itemsize
    moved = 2 * logits.numel() * logits.element_size() + target.numel() * (target.element_size() + 2 * wide)
    return Cost(bytes=moved, flops=3 * logits.numel(), exponentials=logits.numel())


def backward_samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    """The forward's samples with their own statistics, and incoming gradients of the loss, of lse, or of both."""
    maker = Maker(device, torch.promote_types(dtype, torch.float32), seed=6)
    for index, sample in enumerate(samples(device, dtype)):
        logits, target, weight, *options = sample.args
        loss, lse, statistics = reference(*sample.args)
        grad_loss = maker.normal(*loss.shape)
        grad_lse = maker.normal(*lse.shape) if index % 3 == 1 and not sample.family else None
        yield Sample(
            sample.name, (logits, target, weight, statistics, grad_loss, grad_lse, *options), family=sample.family
        )
    logits, target, *_ = next(samples(device, dtype)).args
    plain = (-100, 0.0, 0.0, 0.0, NONE)
    statistics = reference(logits, target, None, *plain)[2]
    spread = maker.normal().expand(target.shape)
    yield Sample("gradient of a sum", (logits, target, None, statistics, spread, None, *plain))
    yield Sample("lse alone", (logits, target, None, statistics, None, maker.normal(*target.shape), *plain))


def _with_gradient_fake(
    logits: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float,
    reduction: int,
) -> tuple[torch.Tensor, ...]:
    wide = check_inputs("cross_entropy_with_gradient", logits, target, weight, label_smoothing)
    rows = tuple(logits.shape[:-1])
    sizes = (() if reduction else rows, rows, (2, *rows))
    return *(logits.new_empty(size, dtype=wide) for size in sizes), logits.new_empty(logits.shape)


def _setup_with_gradient_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    logits, target, weight, *ctx.options = inputs
    ctx.save_for_backward(logits, target, weight, *output[2:])
    ctx.mark_non_differentiable(*output[2:])
    ctx.set_materialize_grads(False)


def _with_gradient_backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    logits, target, weight, statistics, gradient = ctx.saved_tensors
    grad_loss, grad_lse, *_ = grads
    if grad_loss is not None and grad_lse is None and _scales(ctx, logits.dtype, grad_loss):
        return scaled(gradient, grad_loss), *(None,) * 7
    return saved_gradients(ctx, grad_loss, grad_lse, logits, target, weight, statistics, ctx.options)


def _scales(ctx: Any, dtype: torch.dtype, grad_loss: torch.Tensor) -> bool:
    """Whether the incoming gradient is one number for all rows, and nobody wants a derivative of the result."""
    one = grad_loss.dim() == 0 and int(ctx.options[-1]) != NONE
    return one and dtype != torch.float16 and not weight_wanted(ctx) and not torch.is_grad_enabled()


def scaled(gradient: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
    """The gradient for another incoming one. What is zero stays so: ignored rows, where ``by`` is no number."""
    return torch.where(gradient == 0, 0.0, gradient.to(by.dtype) * by).to(gradient.dtype)


def _with_gradient_vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
    return map_rows(with_gradient_op, info, in_dims, args, (0, 0, 1, 0))


def with_gradient_cost(logits: torch.Tensor, target: torch.Tensor, *others: Any) -> Cost:
    """One read of the logits and one write of their gradient; two exponentials an element."""
    alone = cost(logits, target)
    moved = alone.bytes + logits.numel() * logits.element_size()
    return Cost(bytes=moved, flops=6 * logits.numel(), exponentials=2 * logits.numel())


def _rescale_fake(gradient: torch.Tensor, *others: Any) -> None:
    return None


bind_backward(backward_op, reference_backward, fake=_backward_fake, vmap=_backward_vmap)
bind(
    with_gradient_op,
    fake=_with_gradient_fake,
    backward=_with_gradient_backward,
    setup_context=_setup_with_gradient_context,
    vmap=_with_gradient_vmap,
)
torch.library.register_fake("opgraft::cross_entropy_rescale_", _rescale_fake)
_BACKWARD_KINDS = ("rows", "rows", "whole", "statistics", "loss gradient", "rows", *FLAGS)
shard(backward_op, row_rule(_BACKWARD_KINDS, ("rows",)))
shard(with_gradient_op, row_rule(("rows", "rows", "whole", *FLAGS), ("loss", "rows", "statistics", "rows")))

BACKWARD_SPEC = register(
    OpSpec(
        backward_op,
        reference_backward,
        samples=backward_samples,
        derived=("statistics",),
        cost=backward_cost,
        owner="opgraft",
    )
)
WITH_GRADIENT_SPEC = register(
    OpSpec(with_gradient_op, reference_with_gradient, samples=samples, cost=with_gradient_cost, owner="opgraft")
)
