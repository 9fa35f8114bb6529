"""Do two results agree? Bounds come from the dtype and from how many terms a result may be a sum of."""

from __future__ import annotations

import math
from typing import Any

import torch

from opgraft.diagnostics.conform.lab.tree import leaves

# Rounding errors of a sum of n terms grow like sqrt(n) for random signs (Higham, Accuracy and Stability, 2.8); the
# factor leaves room for another order of summation and for elementary functions of a few ulp.
ROOM = 32.0


# Results that can be compared: an object of a class of its own says nothing by ``==``.
PLAIN = (bool, int, float, complex, str, type(None))


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """The values of a tensor of another layout, or of a quantized one."""
    if tensor.is_quantized:
        return tensor.dequantize()
    return tensor.detach().to_dense() if tensor.layout != torch.strided else tensor


def epsilon(dtype: torch.dtype) -> float:
    """The spacing of numbers at 1 in ``dtype``; 0 for integers."""
    return torch.finfo(dtype).eps if dtype.is_floating_point or dtype.is_complex else 0.0


def bound(dtype: torch.dtype, terms: int) -> float:
    """The largest difference, relative to the largest value, that rounding explains."""
    return ROOM * epsilon(dtype) * math.sqrt(max(terms, 1))


def difference(left: torch.Tensor, right: torch.Tensor) -> float:
    """The largest difference relative to the largest finite value; infinite where NaN or infinity differ."""
    if left.shape != right.shape:
        return math.inf
    left, right = _dense(left), _dense(right)
    if left.numel() == 0:
        return 0.0
    if not (left.dtype.is_floating_point or left.dtype.is_complex):
        return 0.0 if bool((left.cpu() == right.cpu().to(left.dtype)).all()) else math.inf
    wide = torch.complex128 if left.dtype.is_complex else torch.float64
    a, b = left.detach().cpu().to(wide), right.detach().cpu().to(wide)
    finite = torch.isfinite(a) & torch.isfinite(b)
    same = finite | (torch.isnan(a) & torch.isnan(b)) | (a == b)
    if not bool(same.all()):
        return math.inf
    if not bool(finite.any()):
        return 0.0
    a, b = a[finite], b[finite]
    scale = max(float(a.abs().max()), float(b.abs().max()))
    return float((a - b).abs().max()) / scale if scale else 0.0


def disagree(left: Any, right: Any, terms: int) -> str:
    """A sentence about the first leaf in which two results differ by more than rounding; ``""`` where none does."""
    ours, theirs = list(leaves(left)), list(leaves(right))
    if len(ours) != len(theirs):
        return f"{len(ours)} results against {len(theirs)}"
    for index, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        where = f"result {index} " if len(ours) > 1 else ""
        if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
            if a.shape != b.shape:
                return f"{where}has shape {tuple(a.shape)} against {tuple(b.shape)}"
            narrow = max((a.dtype, b.dtype), key=epsilon)
            off = difference(a, b)
            if off > bound(narrow, terms):
                return f"{where}differs by {_share(off)}"
        elif isinstance(a, PLAIN) and a != b and not (a != a and b != b):
            return f"{where}is {a!r} against {b!r}"
    return ""


def _share(value: float) -> str:
    return "more than any finite amount" if math.isinf(value) else f"{value:.2g} of the largest value"


def terms_of(tensors: list[torch.Tensor]) -> int:
    """How many terms a result may sum up: the elements of the largest input."""
    return max((tensor.numel() for tensor in tensors), default=1)
