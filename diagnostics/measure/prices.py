"""What one more generated kernel takes on the device, by its bytes: measured.

Bandwidth alone says too little of small kernels, of which each takes a microsecond or two however little it moves.
"""

from __future__ import annotations

import functools
from bisect import bisect_left
from collections.abc import Callable
from typing import Any

import msgspec
import torch

from opgraft.diagnostics.measure import statistics
from opgraft.diagnostics.measure.profile import record

_SMALLEST, _LARGEST = 1 << 14, 1 << 29
_REPEATS = 9


class Prices(msgspec.Struct, frozen=True):
    """Microseconds that a kernel runs, for bytes read plus written; ``points`` rise in bytes."""

    points: tuple[tuple[float, float], ...] = ()

    def us(self, size: float) -> float:
        """Interpolated between the points; at most what the last point's rate gives beyond it. 0 without points."""
        if not self.points or size <= 0:
            return 0.0
        place = bisect_left(self.points, (size, 0.0))
        if place == 0:
            return self.points[0][1]
        low, high = self.points[place - 1], self.points[min(place, len(self.points) - 1)]
        if low == high:
            return low[1] * size / low[0]
        return low[1] + (high[1] - low[1]) * (size - low[0]) / (high[0] - low[0])


def measure(device: torch.device) -> Prices:
    """Prices of a GPU, from the profiler's records of kernels in a row, as warm as a small step leaves its tensors."""
    turns: list[Callable[[], Any]] = []
    sizes = []
    size = _SMALLEST
    while size <= _LARGEST:
        source = torch.zeros(size // 8, dtype=torch.float32, device=device)
        target = torch.empty_like(source)
        # There and back: each reads what the one before it wrote, as in a step.
        pairs = [(source, target), (target, source)]
        turns += [functools.partial(torch.add, pairs[i % 2][0], 1.0, out=pairs[i % 2][1]) for i in range(_REPEATS)]
        sizes.append(size)
        size *= 4

    def chain() -> None:
        for turn in turns:
            turn()

    chain()
    kernels = [r.duration for r in record(chain, device).device() if r.kind == "kernel"]
    if len(kernels) != len(turns):
        return Prices()
    rows = [kernels[i : i + _REPEATS] for i in range(0, len(kernels), _REPEATS)]
    return Prices(tuple((float(size), statistics.median(row)) for size, row in zip(sizes, rows, strict=True)))
