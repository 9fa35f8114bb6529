"""The calls that the four RMS norms are tried on: the same rows, with a residual or without."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from opgraft.ops.rows import eps_for, layouts_with_weights
from opgraft.ops.samples import Maker
from opgraft.registry import Sample

# Where kernels change: part of a warp, a warp, a block, longer than registers hold.
WIDTHS = ((9, 128), (70, 1024), (3, 4096), (2, 8192), (3, 20480), (2, 65536), (1, 70000))


def layouts(
    device: torch.device, dtype: torch.dtype, residuals: Maker | None = None
) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Every layout, with offsets and both roundings in turn; residuals in another layout than x every other time."""
    for index, (name, x, weight) in enumerate(layouts_with_weights(device, dtype)):
        rows = [x]
        if residuals is not None:
            residual = residuals.normal(*x.shape)
            if index % 2 and x.dim() > 1:
                residual = residual.transpose(0, 1).contiguous().transpose(0, 1)
            rows.append(residual)
        yield name, (*rows, weight, eps_for(x), (0.0, 1.0)[index % 2], bool(index % 4 == 1))


def families(
    maker: Maker, tensors: int, sizes: tuple[tuple[int, int], ...], more: tuple[Any, ...] = ()
) -> Iterator[Sample]:
    """Three sizes with a weight and three without, of as many tensors of rows; ``more`` follows the weight."""
    for rows, length in sizes:
        given = tuple(maker.normal(rows, length) for _ in range(tensors))
        yield Sample(f"{rows} by {length}", (*given, maker.normal(length), *more), family="weighted")
        plain = (*given, None, *more) if more else given
        yield Sample(f"{rows} by {length}, plain", plain, family="rows")
