"""What one more generated kernel costs: on the device by its bytes, on the host by its launch. Both are measured.

Bandwidth alone says too little of small kernels, of which each takes a microsecond or two however little it moves.
"""

from __future__ import annotations

import functools
from bisect import bisect_left
from collections.abc import Callable
from typing import Any

import msgspec
import torch

from opgraft.diagnostics.measure import _compat, clock, statistics
from opgraft.diagnostics.measure.arms import own_code
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
        turns += [functools.partial(torch.add, source, 1.0, out=torch.empty_like(source))] * _REPEATS
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


def launch_us(device: torch.device, fewer: int = 4, more: int = 16) -> float:
    """Host microseconds that generated code needs for one kernel more: its buffer, its launch, its end.

    Two compiled functions differ by how many sums over alternating dimensions they chain, which no compiler fuses.
    """
    x = torch.rand(64, 64, device=device)
    times, kernels = [], []
    for length in (fewer, more):
        counted: list[Any] = []

        def count(nodes: list[Any], counted: list[Any] = counted) -> list[Any]:
            counted.extend(n for n in nodes if not _compat.node_is_nothing(n))
            return nodes

        compiled = torch.compile(_alternating(length), dynamic=False)
        with _compat.patched(_compat.scheduler_hook(count)), torch.no_grad():
            compiled(x)
        with torch.no_grad():
            for _ in range(3):
                compiled(x)
            times.append(clock.enqueue_seconds(functools.partial(compiled, x), device, 20))
        kernels.append(len(counted))
    return max(0.0, times[1] - times[0]) * 1e6 / max(1, kernels[1] - kernels[0])


def _alternating(length: int) -> Callable[[torch.Tensor], torch.Tensor]:
    def normalised(x: torch.Tensor) -> torch.Tensor:
        for place in range(length):
            x = x / (1.0 + x.abs().sum(dim=place % 2, keepdim=True))
        return x

    return own_code(normalised, f"normalised_{length}")  # type: ignore[arg-type]
