"""The residual sum, the RMS norm after it and float8_e4m3fn codes with scales in one pass over the rows.

summed = x + residual in their dtype; codes and scales as of ``rms_norm_fp8(summed)``, bit for bit. The sum has a
gradient, codes and scales have none.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from opgraft.ops import norm_samples
from opgraft.ops import rms_norm as plain
from opgraft.ops import rms_norm_fp8 as without_sum
from opgraft.ops.fp8 import BLOCK, check_fp8, encoded_bytes, new_outputs
from opgraft.ops.registration import bind, call, check_like, require_tensor, shard
from opgraft.ops.rows import check_row_weight, check_rows, map_rows, row_rule
from opgraft.ops.samples import Maker
from opgraft.registry import Cost, OpSpec, Sample, register

_op = torch.ops.opgraft.add_rms_norm_fp8.default


def add_rms_norm_fp8(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    offset: float = 0.0,
    cast_before_weight: bool = False,
    block: int = 0,
    scale_upper_bound: float | None = None,
    power_of_two: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``summed = x + residual``, rounded to their dtype, and ``rms_norm_fp8(summed, ...)``.

    Args:
        x: (..., length), any strides, float32, float64, float16 or bfloat16, on the CPU or a CUDA device.
        residual: the shape, dtype and device of ``x``.
        weight, eps, offset, cast_before_weight: as in ``rms_norm``.
        block, scale_upper_bound, power_of_two: as in ``rms_norm_fp8``.

    Returns:
        Codes, scales and the sum, which is the next residual: fresh contiguous tensors.

    Raises:
        TypeError: ``x``, ``residual`` or ``weight`` is not a tensor.
        RuntimeError: shapes, dtypes, devices, block or bound do not fit; the message names the argument.
    """
    require_tensor("add_rms_norm_fp8", x=x, residual=residual)
    if weight is not None:
        require_tensor("add_rms_norm_fp8", weight=weight)
    out: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = call(
        _op, reference, x, residual, weight, eps, offset, cast_before_weight, block, scale_upper_bound, power_of_two
    )
    return out


def reference(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    offset: float = 0.0,
    cast_before_weight: bool = False,
    block: int = 0,
    scale_upper_bound: float | None = None,
    power_of_two: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The meaning, in plain torch."""
    summed = (x + residual).contiguous()
    more = (weight, eps, offset, cast_before_weight, block, scale_upper_bound, power_of_two)
    return (*without_sum.reference(summed, *more), summed)


def _fake(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    offset: float = 0.0,
    cast_before_weight: bool = False,
    block: int = 0,
    scale_upper_bound: float | None = None,
    power_of_two: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    check_rows("add_rms_norm_fp8", "x", x)
    check_row_weight("add_rms_norm_fp8", weight, x)
    check_like("add_rms_norm_fp8", "residual", residual, "x", x)
    check_fp8("add_rms_norm_fp8", block, scale_upper_bound)
    return (*new_outputs(x, block), x.new_empty(x.shape))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    ctx.mark_non_differentiable(*output[:2])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad_codes: Any, grad_scales: Any, grad_summed: torch.Tensor | None) -> tuple[Any, ...]:
    return (grad_summed, grad_summed, *(None,) * 7)


def _vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
    return map_rows(_op, info, in_dims, args, rows=2, sums=False)


def cost(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None = None, *others: Any, **named: Any
) -> Cost:
    """Two reads, and the sum, the codes and the scales written."""
    block = others[3] if len(others) > 3 else named.get("block", 0)
    moved = 3 * x.numel() * x.element_size() + encoded_bytes(x, block) + plain.weight_bytes(weight)
    return Cost(moved, 8 * x.numel())


def samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    """Every layout under every combination of options, and residuals in other layouts than x."""
    maker = Maker(device, dtype, seed=9)
    for index, (name, given) in enumerate(norm_samples.layouts(device, dtype, maker)):
        yield Sample(name, (*given, *without_sum.options(index)))
    yield from norm_samples.families(maker, 2, ((4, 133), (7, 265), (19, 640)), (1e-6, 0.0, False, BLOCK))
    for rows, length in ((9, 128), (70, 1024), (3, 4096), (2, 20480), (2, 65536), (1, 70000)):
        for block in (0, BLOCK):
            pair = maker.normal(rows, length), maker.normal(rows, length)
            args = (*pair, maker.normal(length), 1e-5, 0.0, False, block, None, not block)
            yield Sample(f"{rows} rows of {length}, block {block}", args)


bind(_op, fake=_fake, backward=_backward, setup_context=_setup_context, vmap=_vmap)
shard(_op, row_rule(rows=2, outputs=3, sums=False))

SPEC = register(OpSpec(_op, reference, samples=samples, cost=cost, public=add_rms_norm_fp8, owner="opgraft"))
