"""Diagnosis and measurement of custom kernels under ``torch.compile``.

>>> from opgraft import diagnostics as dx
>>> report = dx.explain(model)(*inputs)
>>> with dx.watch() as watched: train_step()
>>> report = dx.doctor(torch.ops.ns.op)
>>> result = dx.compare(model, inputs, ops=["ns::op"])

Names are imported on first use: each part brings its own dependencies.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from opgraft.diagnostics.collect.watch import explain, watch
    from opgraft.diagnostics.conform.doctor import doctor
    from opgraft.diagnostics.measure.compare import Swap, compare

_HOME = {
    "explain": "opgraft.diagnostics.collect.watch",
    "watch": "opgraft.diagnostics.collect.watch",
    "doctor": "opgraft.diagnostics.conform.doctor",
    "compare": "opgraft.diagnostics.measure.compare",
    "Swap": "opgraft.diagnostics.measure.compare",
}

__all__ = ["Swap", "compare", "doctor", "explain", "watch"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)
