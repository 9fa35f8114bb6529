"""A call in float64, where the op computes the same there: what finite differences stand on."""

from __future__ import annotations

import torch

from opgraft.diagnostics.conform.lab import compare, vary
from opgraft.diagnostics.conform.lab.bench import Bench
from opgraft.diagnostics.conform.lab.case import Case
from opgraft.diagnostics.conform.lab.tree import leaves

# A share of the largest value that no rounding of float32 explains in a handful of operations.
FAR = 0.02


def apart(near: object, far: object) -> float:
    """The largest difference of a call's results in float32 and in float64, of those that follow the dtype."""
    worst = 0.0
    for a, b in zip(leaves(near), leaves(far), strict=False):
        if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
            continue
        if a.dtype == torch.float32 and b.dtype == torch.float64 and a.shape == b.shape:
            worst = max(worst, compare.difference(a, b))
    return worst


def in_double(bench: Bench, case: Case) -> Case | None:
    """The call in float64; None where the op takes it and gives other numbers than in float32.

    A kernel that reads a pointer as float32 without asking for the dtype does that: it returns what lay in memory, and
    differences of that say nothing about a gradient.
    """
    wide = vary.recast(case, torch.float64)
    if wide is None:
        return case
    narrow, result = bench.real(case), bench.real(wide)
    if narrow.ok and result.ok and apart(narrow.outputs, result.outputs) > FAR:
        return None
    return wide
