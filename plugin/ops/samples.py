"""Tensors in the forms that break kernels, for the ops' ``samples``. Values come from a generator of their own."""

from __future__ import annotations

from collections.abc import Iterator

import torch


class Maker:
    """Random tensors of one device and dtype, the same ones every time."""

    def __init__(self, device: torch.device, dtype: torch.dtype, seed: int = 0) -> None:
        self.device = device
        self.dtype = dtype
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int, scale: float = 1.0) -> torch.Tensor:
        """Normally distributed, contiguous. Drawn on the CPU in float64, so every device and dtype gets the same."""
        drawn = torch.randn(shape, generator=self.generator, dtype=torch.float64) * scale
        return drawn.to(device=self.device, dtype=self.dtype)

    def uniform(self, *shape: int, low: float = 0.0, high: float = 1.0) -> torch.Tensor:
        """Uniform in [low, high), contiguous."""
        drawn = torch.rand(shape, generator=self.generator, dtype=torch.float64) * (high - low) + low
        return drawn.to(device=self.device, dtype=self.dtype)

    def layouts(self) -> Iterator[tuple[str, torch.Tensor]]:
        """One tensor for every way in which a tensor can be other than a dense, aligned block."""
        yield "dense", self.normal(4, 32)
        yield "ragged", self.normal(3, 5, 7)
        yield "prime", self.normal(1009)
        yield "one element", self.normal(1)
        yield "scalar", self.normal()
        yield "empty", self.normal(0)
        yield "empty inside", self.normal(3, 0, 5)
        yield "transposed", self.normal(6, 10).t()
        yield "permuted", self.normal(2, 3, 4, 5).permute(0, 2, 3, 1)
        yield "channels last", self.normal(2, 3, 4, 5).to(memory_format=torch.channels_last)
        yield "sliced", self.normal(8, 20)[:, 3:17]
        yield "strided", self.normal(40)[::3]
        yield "offset by one", self.normal(129)[1:]
        yield "expanded", self.normal(1, 7).expand(5, 7)
        yield "expanded scalar", self.normal().expand(3, 4)
        yield "several vectors and a tail", self.normal(2, 4099)
