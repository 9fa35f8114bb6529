"""Cross entropy of ``hidden @ weight.T`` without the logits: rows are taken in chunks, and each chunk's logits are gone
before the next one's are made.

The products are torch's own; what is between them is ``cross_entropy``, whose one pass gives loss and gradient. The
gradients of hidden and weight are summed up in the forward, for an incoming gradient of one, and scaled afterwards.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from opgraft import _compat
from opgraft.ops import cross_entropy_reference as plain
from opgraft.ops.cross_entropy import backward_op, cross_entropy, rows_op, with_gradient_op
from opgraft.ops.cross_entropy_reference import MEAN, NONE, SUM
from opgraft.ops.registration import require_tensor, vector_jacobian_product

# Logits of one chunk: few enough to be no burden, many enough for products at full speed.
CHUNK_ELEMENTS = 2**26
_REDUCTIONS = {"none": NONE, "mean": MEAN, "sum": SUM}


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    class_weight: torch.Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    reduction: str = "mean",
    return_lse: bool = False,
    chunk_rows: int | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """``cross_entropy(linear(hidden, weight, bias), target)`` that never holds all logits.

    Args:
        hidden: (..., features).
        weight: (classes, features), of the dtype of ``hidden``.
        target: (...), int64 or int32 classes.
        bias: (classes,).
        class_weight: (classes,), what ``cross_entropy`` calls ``weight``.
        ignore_index, label_smoothing, z_loss, softcap, reduction, return_lse: as for ``cross_entropy``.
        chunk_rows: rows whose logits are held at once; by default as many as make 2**26 logits, or as many logits as
            ``hidden`` has elements where that is more.

    Returns:
        The loss, in float32 for 16-bit inputs; with ``return_lse`` also lse of every row. The gradient of ``weight`` is
        summed in the dtype of ``weight``: one rounding a chunk. With ``reduction="none"``, or where lse has a gradient,
        the backward makes the logits of every chunk a second time.

    Raises:
        TypeError: ``hidden``, ``weight`` or ``target`` is no tensor. ValueError: an unknown reduction or a bad number.
        RuntimeError: shapes, dtypes or devices do not fit.
    """
    require_tensor("linear_cross_entropy", hidden=hidden, weight=weight, target=target)
    if reduction not in _REDUCTIONS:
        raise ValueError(f"linear_cross_entropy: reduction is {reduction!r}, expected 'mean', 'sum' or 'none'")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"linear_cross_entropy: softcap is {softcap!r}, expected a positive number or None")
    if chunk_rows is not None and chunk_rows < 1:
        raise ValueError(f"linear_cross_entropy: chunk_rows is {chunk_rows}, expected at least 1")
    if torch.is_autocast_enabled(hidden.device.type):
        dtype = torch.get_autocast_dtype(hidden.device.type)
        hidden, weight, bias = hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    _check(hidden, weight, target, bias)
    kept_apart = class_weight is not None and z_loss != 0 and reduction == "mean"  # two denominators
    if _compat.is_mapped() or _compat.is_transformed() or kept_apart or _compat.is_dtensor(hidden):
        return cross_entropy(
            F.linear(hidden, weight, bias),
            target,
            weight=class_weight,
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
            z_loss=z_loss,
            softcap=softcap,
            reduction=reduction,
            return_lse=return_lse,
        )
    wide = torch.promote_types(hidden.dtype, torch.float32)
    class_weight = None if class_weight is None else class_weight.to(wide)
    options = (ignore_index, float(label_smoothing), float(z_loss), float(softcap or 0.0))
    rows = chunk_rows or _chunk_rows(hidden, weight)
    with torch.autocast(hidden.device.type, enabled=False):
        loss, lse = _Chunked.apply(  # type: ignore[no-untyped-call]
            hidden.reshape(-1, hidden.shape[-1]),
            weight,
            bias,
            target.reshape(-1),
            class_weight,
            options,
            _REDUCTIONS[reduction],
            rows,
        )
    if reduction == "none":
        loss = loss.reshape(target.shape)
    return (loss, lse.reshape(target.shape)) if return_lse else loss


def _check(hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, bias: torch.Tensor | None) -> None:
    # Not torch._check: Dynamo takes no message that speaks of tensors.
    op = "linear_cross_entropy"
    if hidden.dim() < 1 or weight.dim() != 2 or weight.shape[1] != hidden.shape[-1]:
        raise RuntimeError(
            f"{op}: weight has shape {tuple(weight.shape)}, expected (classes, features) with the features of hidden, "
            f"{tuple(hidden.shape)}"
        )
    if target.shape != hidden.shape[:-1]:
        raise RuntimeError(
            f"{op}: target has shape {tuple(target.shape)}, expected that of hidden, {tuple(hidden.shape)}, without "
            "its last dimension"
        )
    if weight.dtype != hidden.dtype or (bias is not None and bias.dtype != hidden.dtype):
        raise RuntimeError(
            f"{op}: weight has dtype {weight.dtype}, expected that of hidden, {hidden.dtype}; bias likewise"
        )


def _chunk_rows(hidden: torch.Tensor, weight: torch.Tensor) -> int:
    rows = max(CHUNK_ELEMENTS, hidden.numel()) // max(weight.shape[0], 1)
    return max(rows // 128 * 128, 128)


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        target: torch.Tensor,
        class_weight: torch.Tensor | None,
        options: tuple[Any, ...],
        reduction: int,
        chunk_rows: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        wanted = ctx.needs_input_grad[:3]
        gradients = _Gradients(hidden, weight, bias, wanted) if any(wanted) and reduction != NONE else None
        losses, sums = [], []
        for part in _parts(hidden.shape[0], chunk_rows):
            rows, goal = hidden[part], target[part]
            logits = F.linear(rows, weight, bias)
            if gradients is None:
                loss, lse, _ = rows_op(logits, goal, class_weight, *options, NONE if reduction == NONE else SUM)
            else:
                loss, lse, _, gradient = with_gradient_op(logits, goal, class_weight, *options, SUM)
                gradients.add(part, rows, gradient)
            losses.append(loss)
            sums.append(lse)
        lse = torch.cat(sums)
        denominator = _denominator(target, class_weight, options[0], lse.dtype) if reduction == MEAN else None
        loss = torch.cat(losses) if reduction == NONE else torch.stack(losses).sum()
        if denominator is not None:
            loss = loss / denominator
        found = (None, None, None) if gradients is None else gradients.found
        ctx.save_for_backward(hidden, weight, bias, target, class_weight, denominator, *found)
        ctx.options, ctx.reduction, ctx.chunk_rows, ctx.ready = options, reduction, chunk_rows, gradients is not None
        ctx.set_materialize_grads(False)
        return loss, lse

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        grad_loss, grad_lse = grads
        hidden, weight, bias, target, class_weight, denominator, *found = ctx.saved_tensors
        wanted = ctx.needs_input_grad[:3]
        unwanted = (None,) * 4
        if grad_loss is None and grad_lse is None:
            return (None, None, None, None, *unwanted)
        if torch.is_grad_enabled() or ctx.needs_input_grad[4]:
            inputs = (hidden, weight, bias, target, class_weight, ctx.options, ctx.reduction)
            taken = vector_jacobian_product(reference, inputs, (grad_loss, grad_lse))
            return (*taken[:3], None, taken[4], None, None, None)
        if ctx.ready and grad_lse is None:
            assert grad_loss is not None
            factor = grad_loss if denominator is None else grad_loss / denominator
            scaled = [None if g is None else (g * factor).to(g.dtype) for g in found]
            return (*scaled, None, *unwanted)
        gradients = _Gradients(hidden, weight, bias, wanted)
        if grad_loss is not None and ctx.reduction != NONE:
            factor = grad_loss if denominator is None else grad_loss / denominator
            grad_loss = factor.expand(target.shape)
        for part in _parts(hidden.shape[0], ctx.chunk_rows):
            rows, goal = hidden[part], target[part]
            logits = F.linear(rows, weight, bias)
            _, _, statistics = rows_op(logits, goal, class_weight, *ctx.options, NONE)
            incoming = [None if g is None else g[part] for g in (grad_loss, grad_lse)]
            gradients.add(
                part, rows, backward_op(logits, goal, class_weight, statistics, *incoming, *ctx.options, NONE)
            )
        return (*gradients.found, None, *unwanted)


def _parts(rows: int, chunk_rows: int) -> list[slice]:
    """At least one, so that no rows have a loss too."""
    return [slice(begin, min(begin + chunk_rows, rows)) for begin in range(0, max(rows, 1), chunk_rows)]


class _Gradients:
    """The gradients of hidden, weight and bias that are wanted, chunk by chunk."""

    def __init__(
        self, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, wanted: tuple[bool, ...]
    ) -> None:
        self.weight = weight
        self.found = [
            torch.empty_like(hidden) if wanted[0] else None,
            torch.zeros_like(weight) if wanted[1] else None,
            torch.zeros_like(bias) if bias is not None and wanted[2] else None,
        ]

    def add(self, part: slice, rows: torch.Tensor, gradient: torch.Tensor) -> None:
        hidden, weight, bias = self.found
        if hidden is not None:
            hidden[part] = gradient @ self.weight
        if weight is not None:
            weight.addmm_(gradient.t(), rows)
        if bias is not None:
            bias += gradient.sum(0)


def _denominator(
    target: torch.Tensor, class_weight: torch.Tensor | None, ignore_index: int, dtype: torch.dtype
) -> torch.Tensor:
    kept = target != ignore_index
    if class_weight is None:
        return kept.sum().to(dtype)
    return torch.where(kept, class_weight[torch.where(kept, target, 0).long()], 0.0).sum()


def reference(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    target: torch.Tensor,
    class_weight: torch.Tensor | None,
    options: tuple[Any, ...],
    reduction: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The meaning, in plain torch, with all logits."""
    ignore_index, label_smoothing, z_loss, softcap = options
    logits = F.linear(hidden, weight, bias)
    found = plain.reference(logits, target, class_weight, ignore_index, label_smoothing, z_loss, softcap, reduction)
    loss, lse, _ = found
    return loss, lse
