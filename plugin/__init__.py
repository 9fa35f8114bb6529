"""Hand-written C++/CUDA kernels as first-class citizens of ``torch.compile``.

Importing registers the ops and changes nothing else: no torch config, no logger, no hook.
"""

from __future__ import annotations

from opgraft import library as _library

_library.load()

from opgraft.ops.causal_conv1d import causal_conv1d
from opgraft.ops.causal_conv1d_update import causal_conv1d_update, causal_conv1d_update_
from opgraft.ops.gelu import gelu
from opgraft.ops.linear_scan import linear_scan
from opgraft.ops.registration import register_sharding_rules
from opgraft.ops.selective_scan import selective_scan
from opgraft.ops.selective_scan_update import selective_scan_update, selective_scan_update_
from opgraft.registry import Cost, OpSpec, Sample, describe

__version__ = "0.1.0"

__all__ = [
    "Cost",
    "OpSpec",
    "Sample",
    "__version__",
    "causal_conv1d",
    "causal_conv1d_update",
    "causal_conv1d_update_",
    "describe",
    "gelu",
    "linear_scan",
    "register_sharding_rules",
    "selective_scan",
    "selective_scan_update",
    "selective_scan_update_",
]
