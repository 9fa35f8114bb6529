"""RMS norm along the last dimension, y = x / sqrt(mean(x^2) + eps) * (weight + offset) (Zhang and Sennrich, 2019,
arXiv 1910.07467), and its gradient with that of the weight in one pass over the rows.

Where the result is rounded is part of an op's meaning in 16-bit types. By default once, at the end: torch's own
``rms_norm``, Gemma, OLMo 2. With ``cast_before_weight`` the normalised x is rounded to its dtype before the weight:
Llama, Qwen, Mistral and T5 in transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from opgraft.ops import norm_samples
from opgraft.ops.registration import (
    bind,
    bind_backward,
    call,
    check_like,
    require_tensor,
    shard,
    vector_jacobian_product,
)
from opgraft.ops.rows import check_row_weight, check_rows, map_rows, row_rule
from opgraft.ops.samples import Maker
from opgraft.registry import Cost, OpSpec, Sample, register

_op = torch.ops.opgraft.rms_norm.default
_backward_op = torch.ops.opgraft.rms_norm_backward.default


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    offset: float = 0.0,
    cast_before_weight: bool = False,
) -> torch.Tensor:
    """Every row of the last dimension over the root of its mean square, times ``weight + offset``.

    Args:
        x: (..., length), any strides, float32, float64, float16 or bfloat16, on the CPU or a CUDA device.
        weight: (length,), any of these dtypes; its gradient has its own dtype and is a sum in fixed order.
        eps: added to the mean square.
        offset: added to the weight where there is one: 1 for Gemma's, which are kept around zero.
        cast_before_weight: round the normalised x to its dtype before the weight, as transformers' Llama does.

    Returns:
        A fresh contiguous tensor of the shape and dtype of ``x``; computed in float32 for 16-bit types. A row's bits do
        not depend on the other rows.

    Raises:
        TypeError: ``x`` or ``weight`` is not a tensor.
        RuntimeError: shapes, dtypes or devices do not fit; the message names the argument.
    """
    require_tensor("rms_norm", x=x)
    if weight is not None:
        require_tensor("rms_norm", weight=weight)
    out: torch.Tensor = call(_op, reference, x, weight, eps, offset, cast_before_weight)
    return out


def reference(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    offset: float = 0.0,
    cast_before_weight: bool = False,
) -> torch.Tensor:
    """The meaning, in plain torch, in float32 (float64 for float64)."""
    return normalised(x, weight, eps, offset, cast_before_weight).to(x.dtype).contiguous()


def normalised(
    x: torch.Tensor, weight: torch.Tensor | None, eps: float, offset: float, cast_before_weight: bool
) -> torch.Tensor:
    """The result before it is rounded."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    normal = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if cast_before_weight:
        normal = normal.to(x.dtype).to(wide.dtype)
    if weight is None:
        return normal
    return normal * (weight.to(wide.dtype) + offset if offset else weight.to(wide.dtype))


def _fake(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    offset: float = 0.0,
    cast_before_weight: bool = False,
) -> torch.Tensor:
    check_rows("rms_norm", "x", x)
    check_row_weight("rms_norm", weight, x)
    return x.new_empty(x.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, weight, ctx.eps, ctx.offset, _ = inputs
    ctx.save_for_backward(x, weight)


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    x, weight = ctx.saved_tensors
    grad_x, grad_weight = _backward_op(grad, x, weight, ctx.eps, ctx.offset)
    return grad_x, None if weight is None else grad_weight, None, None, None


def _vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
    return map_rows(_op, info, in_dims, args, rows=1, sums=False)


def weight_bytes(weight: torch.Tensor | None) -> int:
    """What a kernel reads of a weight."""
    return 0 if weight is None else weight.numel() * weight.element_size()


def cost(x: torch.Tensor, weight: torch.Tensor | None = None, *others: Any) -> Cost:
    """One read and one write; a multiply-add and two products an element."""
    return Cost(2 * x.numel() * x.element_size() + weight_bytes(weight), 4 * x.numel())


def samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    """Every layout, the widths at which kernels change, offsets, both roundings, rows of zeros and of large values."""
    yield from (Sample(name, args) for name, args in norm_samples.layouts(device, dtype))
    maker = Maker(device, dtype, seed=2)
    yield from norm_samples.families(maker, 1, ((4, 33), (7, 65), (19, 8)))
    wide = Maker(device, torch.promote_types(dtype, torch.float32), seed=3)
    for rows, length in norm_samples.WIDTHS:
        weight = (maker if length % 3 else wide).normal(length)
        yield Sample(f"{rows} rows of {length}", (maker.normal(rows, length), weight, 1e-5, 0.0, length == 4096))
    packed = maker.normal(5, 3, 4, 64)
    yield Sample("a slice of packed rows", (packed[:, 1], maker.normal(64)))
    yield Sample("rows of zeros", (maker.normal(3, 16) * 0, maker.normal(16)))
    yield Sample("large values", (maker.normal(3, 40, scale=3e3), maker.normal(40), 1e-6, 1.0, True))
    yield Sample("small values", (maker.normal(3, 40, scale=1e-3), maker.normal(40), 1e-6, 0.0, False))
    yield Sample("not a number", (maker.normal(3, 8) / maker.normal(3, 8).fill_(0), maker.normal(8)))


def large(device: torch.device, dtype: torch.dtype) -> tuple[Sample, Callable[[Any], None]]:
    """Over 2^31 elements; the first and the last row are compared, the latter out of reach of a 32-bit index."""
    x = torch.ones(2**19 + 1, 4104, device=device, dtype=dtype)
    x[-1] = Maker(device, dtype).normal(4104)
    weight = Maker(device, dtype, seed=1).normal(4104)

    def check(y: torch.Tensor) -> None:
        for row in (0, -1):
            torch.testing.assert_close(y[row], reference(x[row], weight))

    return Sample("over 2^31 elements", (x, weight)), check


def reference_backward(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor | None, eps: float, offset: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of the reference with respect to x and weight; the latter is empty where there is no weight."""
    grad_x, grad_weight, *_ = vector_jacobian_product(reference, (x, weight, eps, offset), (grad,))
    assert grad_x is not None
    return grad_x.contiguous(), x.new_empty(0) if grad_weight is None else grad_weight


def _backward_fake(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor | None, eps: float, offset: float
) -> tuple[torch.Tensor, torch.Tensor]:
    check_rows("rms_norm_backward", "x", x)
    check_row_weight("rms_norm_backward", weight, x)
    check_like("rms_norm_backward", "grad", grad, "x", x)
    return x.new_empty(x.shape), x.new_empty(0) if weight is None else weight.new_empty(weight.shape)


def _backward_vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
    return map_rows(_backward_op, info, in_dims, args, rows=2, sums=True)


def backward_cost(grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor | None, *others: Any) -> Cost:
    """Two reads and one write, the weight once and its gradient once."""
    return Cost(3 * x.numel() * x.element_size() + 2 * weight_bytes(weight), 10 * x.numel())


def backward_samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    """The forward's samples, with incoming gradients that are dense, expanded or permuted."""
    maker = Maker(device, dtype, seed=4)
    for sample in samples(device, dtype):
        filled: tuple[Any, ...] = (*sample.args, *(None, 1e-6, 0.0, False)[len(sample.args) - 1 :])
        x, weight, eps, offset, _ = filled
        yield Sample(sample.name, (maker.normal(*x.shape), x, weight, eps, offset), family=sample.family)
    x, weight = maker.normal(6, 16), maker.normal(16)
    yield Sample("gradient of a sum", (maker.normal().expand(6, 16), x, weight, 1e-6, 1.0))
    yield Sample("gradient transposed", (maker.normal(16, 6).t(), x, weight, 1e-6, 0.0))
    yield Sample("many rows", (maker.normal(5000, 16), maker.normal(5000, 16), weight, 1e-6, 0.0))


bind(_op, fake=_fake, backward=_backward, setup_context=_setup_context, vmap=_vmap)
bind_backward(_backward_op, reference_backward, fake=_backward_fake, vmap=_backward_vmap)
shard(_op, row_rule(rows=1, outputs=1, sums=False))
shard(_backward_op, row_rule(rows=2, outputs=2, sums=True))

SPEC = register(
    OpSpec(
        _op,
        reference,
        samples=samples,
        cost=cost,
        public=rms_norm,
        backward=_backward_op,
        large=large,
        owner="opgraft",
    )
)
BACKWARD_SPEC = register(
    OpSpec(_backward_op, reference_backward, samples=backward_samples, cost=backward_cost, owner="opgraft")
)
