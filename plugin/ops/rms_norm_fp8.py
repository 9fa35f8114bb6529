"""RMS norm with float8_e4m3fn results and their scales, of a row or of 128 elements: what feeds an fp8 matrix product.

The normalised values are not rounded in between: they go from float32 to the codes. The rule is in
opgraft/ops/fp8.py; the CPU's and the GPU's results are the same bits, since sums of squares are taken in one stated
order (csrc/support/row_mapping.h). Codes and scales have no gradient.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from opgraft.ops import norm_samples
from opgraft.ops import rms_norm as plain
from opgraft.ops.fp8 import BLOCK, check_fp8, encode, encoded_bytes, new_outputs
from opgraft.ops.registration import bind, call, require_tensor, shard
from opgraft.ops.rows import check_row_weight, check_rows, map_rows, row_rule
from opgraft.ops.samples import Maker
from opgraft.registry import Cost, OpSpec, Sample, register

_op = torch.ops.opgraft.rms_norm_fp8.default


def rms_norm_fp8(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    offset: float = 0.0,
    cast_before_weight: bool = False,
    block: int = 0,
    scale_upper_bound: float | None = None,
    power_of_two: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``rms_norm`` in float32, as float8_e4m3fn codes with scales: codes times scale give back the values.

    Args:
        x, weight, eps, offset, cast_before_weight: as in ``rms_norm``.
        block: 0 for one scale a row, 128 for one a block of 128 elements (the last block of a row may be shorter).
        scale_upper_bound: no scale is larger; what does not fit saturates at +-448. The bound is one of the scale:
        where
            another library bounds the largest magnitude, give that over 448.
        power_of_two: scales are rounded up to powers of two, as E8M0 scales need them.

    Returns:
        The codes, of the shape of ``x``, and float32 scales of shape (..., 1) or (..., ceil(length / 128)); both fresh,
        contiguous and without a gradient.

    Raises:
        TypeError: ``x`` or ``weight`` is not a tensor.
        RuntimeError: shapes, dtypes, devices, block or bound do not fit; the message names the argument.
    """
    require_tensor("rms_norm_fp8", x=x)
    if weight is not None:
        require_tensor("rms_norm_fp8", weight=weight)
    out: tuple[torch.Tensor, torch.Tensor] = call(
        _op, reference, x, weight, eps, offset, cast_before_weight, block, scale_upper_bound, power_of_two
    )
    return out


def reference(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    offset: float = 0.0,
    cast_before_weight: bool = False,
    block: int = 0,
    scale_upper_bound: float | None = None,
    power_of_two: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The meaning, in plain torch. Sums in torch's order: scales may differ from the op's in their last bit."""
    values = plain.normalised(x, weight, eps, offset, cast_before_weight)
    return encode(values, block, scale_upper_bound, power_of_two)


def _fake(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    offset: float = 0.0,
    cast_before_weight: bool = False,
    block: int = 0,
    scale_upper_bound: float | None = None,
    power_of_two: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    check_rows("rms_norm_fp8", "x", x)
    check_row_weight("rms_norm_fp8", weight, x)
    check_fp8("rms_norm_fp8", block, scale_upper_bound)
    return new_outputs(x, block)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    ctx.mark_non_differentiable(*output)


def _backward(ctx: Any, *grads: Any) -> tuple[None, ...]:
    return (None,) * 8


def _vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
    return map_rows(_op, info, in_dims, args, rows=1, sums=False)


def cost(x: torch.Tensor, weight: torch.Tensor | None = None, *others: Any, **named: Any) -> Cost:
    """One read, and the codes and scales written."""
    block = others[3] if len(others) > 3 else named.get("block", 0)
    moved = x.numel() * x.element_size() + encoded_bytes(x, block) + plain.weight_bytes(weight)
    return Cost(moved, 7 * x.numel())


def options(index: int) -> tuple[int, float | None, bool]:
    """Every combination of block, bound and power of two in turn, for samples."""
    return (0, BLOCK)[index % 2], (None, 0.004)[index // 2 % 2], bool(index // 4 % 2)


def samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    """Every layout under every combination of options, the widths at which kernels change, zeros and extremes."""
    for index, (name, given) in enumerate(norm_samples.layouts(device, dtype)):
        yield Sample(name, (*given, *options(index)))
    maker = Maker(device, dtype, seed=8)
    yield from norm_samples.families(maker, 1, ((4, 133), (7, 265), (19, 640)), (1e-6, 0.0, False, BLOCK))
    for index, (rows, length) in enumerate(((9, 128), (70, 1024), (3, 4096), (2, 20480), (2, 65536), (1, 70000))):
        for block in (0, BLOCK):
            args = (
                maker.normal(rows, length),
                maker.normal(length),
                1e-5,
                0.0,
                bool(index % 2),
                block,
                None,
                bool(block),
            )
            yield Sample(f"{rows} rows of {length}, block {block}", args)
    yield Sample("rows of zeros", (maker.normal(3, 16) * 0, maker.normal(16)))
    yield Sample("not a number", (maker.normal(3, 8) / maker.normal(3, 8).fill_(0), maker.normal(8)))


bind(_op, fake=_fake, backward=_backward, setup_context=_setup_context, vmap=_vmap)
shard(_op, row_rule(rows=1, outputs=2, sums=False))

SPEC = register(OpSpec(_op, reference, samples=samples, cost=cost, public=rms_norm_fp8, owner="opgraft"))
