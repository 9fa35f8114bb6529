"""The residual sum and the RMS norm after it in one pass: summed = x + residual in their dtype, y = rms_norm(summed).

Two of these are in every layer of a pre-norm transformer. Apart, the sum is written and read again; together it is
written once, for the next layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from opgraft.ops import norm_samples
from opgraft.ops import rms_norm as plain
from opgraft.ops.registration import (
    bind,
    bind_backward,
    call,
    check_like,
    require_tensor,
    shard,
)
from opgraft.ops.rows import check_row_weight, check_rows, map_rows, row_rule
from opgraft.ops.samples import Maker
from opgraft.registry import Cost, OpSpec, Sample, register

_op = torch.ops.opgraft.add_rms_norm.default
_backward_op = torch.ops.opgraft.add_rms_norm_backward.default


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    offset: float = 0.0,
    cast_before_weight: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``summed = x + residual``, rounded to their dtype, and ``rms_norm(summed, weight, eps, offset)``.

    Args:
        x: (..., length), any strides, float32, float64, float16 or bfloat16, on the CPU or a CUDA device.
        residual: the shape, dtype and device of ``x``.
        weight, eps, offset, cast_before_weight: as in ``rms_norm``.

    Returns:
        y and the sum, which is the next residual: two fresh contiguous tensors of the shape and dtype of ``x``.

    Raises:
        TypeError: ``x``, ``residual`` or ``weight`` is not a tensor.
        RuntimeError: shapes, dtypes or devices do not fit; the message names the argument.
    """
    require_tensor("add_rms_norm", x=x, residual=residual)
    if weight is not None:
        require_tensor("add_rms_norm", weight=weight)
    out: tuple[torch.Tensor, torch.Tensor] = call(_op, reference, x, residual, weight, eps, offset, cast_before_weight)
    return out


def reference(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    offset: float = 0.0,
    cast_before_weight: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The meaning, in plain torch."""
    summed = (x + residual).contiguous()
    return plain.reference(summed, weight, eps, offset, cast_before_weight), summed


def _fake(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    offset: float = 0.0,
    cast_before_weight: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    check_rows("add_rms_norm", "x", x)
    check_row_weight("add_rms_norm", weight, x)
    check_like("add_rms_norm", "residual", residual, "x", x)
    return x.new_empty(x.shape), x.new_empty(x.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    _, _, weight, ctx.eps, ctx.offset, _ = inputs
    ctx.save_for_backward(output[1], weight)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad: torch.Tensor | None, grad_summed: torch.Tensor | None) -> tuple[Any, ...]:
    if grad is None:
        return grad_summed, grad_summed, None, None, None, None
    summed, weight = ctx.saved_tensors
    grad_x, grad_weight = _backward_op(grad, grad_summed, summed, weight, ctx.eps, ctx.offset)
    return grad_x, grad_x, None if weight is None else grad_weight, None, None, None


def _vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
    return map_rows(_op, info, in_dims, args, rows=2, sums=False)


def cost(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None = None, *others: Any) -> Cost:
    """Two reads and two writes; a sum more than ``rms_norm`` an element."""
    return Cost(4 * x.numel() * x.element_size() + plain.weight_bytes(weight), 5 * x.numel())


def samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    """Every layout, the widths at which kernels change, and residuals in other layouts than x."""
    maker = Maker(device, dtype, seed=5)
    yield from (Sample(name, args) for name, args in norm_samples.layouts(device, dtype, maker))
    yield from norm_samples.families(maker, 2, ((4, 33), (7, 65), (19, 8)))
    for rows, length in norm_samples.WIDTHS:
        pair = maker.normal(rows, length), maker.normal(rows, length)
        yield Sample(f"{rows} rows of {length}", (*pair, maker.normal(length), 1e-5, 0.0, length == 4096))


def large(device: torch.device, dtype: torch.dtype) -> tuple[Sample, Callable[[Any], None]]:
    """Over 2^31 elements; the first and the last row are compared, the latter out of reach of a 32-bit index."""
    sample, _ = plain.large(device, dtype)
    x, weight = sample.args
    residual = torch.zeros_like(x)
    residual[-1] = Maker(device, dtype, seed=6).normal(x.shape[1])

    def check(found: tuple[torch.Tensor, torch.Tensor]) -> None:
        for row in (0, -1):
            wanted = reference(x[row], residual[row], weight)
            torch.testing.assert_close((found[0][row], found[1][row]), wanted)

    return Sample("over 2^31 elements", (x, residual, weight)), check


def reference_backward(
    grad: torch.Tensor,
    grad_residual: torch.Tensor | None,
    summed: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    offset: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradient with respect to x, which is that of the residual too, and to the weight, given the sum."""
    grad_x, grad_weight = plain.reference_backward(grad, summed, weight, eps, offset)
    return (grad_x if grad_residual is None else (grad_x + grad_residual).contiguous()), grad_weight


def _backward_fake(
    grad: torch.Tensor,
    grad_residual: torch.Tensor | None,
    summed: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    offset: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    op = "add_rms_norm_backward"
    check_rows(op, "x", summed)
    check_row_weight(op, weight, summed)
    check_like(op, "grad", grad, "x", summed)
    if grad_residual is not None:
        check_like(op, "grad_residual", grad_residual, "x", summed)
    grad_weight = summed.new_empty(0) if weight is None else weight.new_empty(weight.shape)
    return summed.new_empty(summed.shape), grad_weight


def _backward_vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
    return map_rows(_backward_op, info, in_dims, args, rows=3, sums=True)


def backward_cost(grad: torch.Tensor, grad_residual: torch.Tensor | None, *others: Any) -> Cost:
    """One read more than ``rms_norm_backward`` where the sum has a gradient of its own."""
    found = plain.backward_cost(grad, *others)
    return Cost(found.bytes + (0 if grad_residual is None else grad.numel() * grad.element_size()), found.flops)


def backward_samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    """The forward's samples, with and without a gradient of the sum; gradients dense, expanded or permuted."""
    maker = Maker(device, dtype, seed=7)
    for index, sample in enumerate(samples(device, dtype)):
        filled: tuple[Any, ...] = (*sample.args, *(None, 1e-6, 0.0, False)[len(sample.args) - 2 :])
        x, residual, weight, eps, offset, _ = filled
        more = maker.normal(*x.shape) if index % 3 or sample.family else None
        args = (maker.normal(*x.shape), more, (x + residual).contiguous(), weight, eps, offset)
        yield Sample(sample.name, args, family=sample.family)
    summed, weight = maker.normal(6, 16), maker.normal(16)
    expanded, transposed = maker.normal().expand(6, 16), maker.normal(16, 6).t()
    yield Sample("gradient of a sum", (expanded, transposed, summed, weight, 1e-6, 1.0))
    yield Sample("gradient transposed", (transposed, expanded, summed, None, 1e-6, 0.0))
    many = maker.normal(5000, 16)
    yield Sample("many rows", (maker.normal(5000, 16), many, maker.normal(5000, 16), weight, 1e-6, 0.0))


bind(_op, fake=_fake, backward=_backward, setup_context=_setup_context, vmap=_vmap)
bind_backward(_backward_op, reference_backward, fake=_backward_fake, vmap=_backward_vmap)
shard(_op, row_rule(rows=2, outputs=2, sums=False))
shard(_backward_op, row_rule(rows=3, outputs=2, sums=True))

SPEC = register(
    OpSpec(
        _op,
        reference,
        samples=samples,
        cost=cost,
        public=add_rms_norm,
        backward=_backward_op,
        large=large,
        owner="opgraft",
    )
)
BACKWARD_SPEC = register(
    OpSpec(_backward_op, reference_backward, samples=backward_samples, cost=backward_cost, owner="opgraft")
)
