"""Hand-written C++/CUDA kernels as first-class citizens of ``torch.compile``.

Importing registers the ops and changes nothing else: no torch config, no logger, no hook.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from opgraft import library as _library

_library.load()

from opgraft.ops.add_rms_norm import add_rms_norm
from opgraft.ops.add_rms_norm_fp8 import add_rms_norm_fp8
from opgraft.ops.causal_conv1d import causal_conv1d
from opgraft.ops.causal_conv1d_update import causal_conv1d_update, causal_conv1d_update_
from opgraft.ops.cross_entropy import cross_entropy
from opgraft.ops.cross_entropy_backward import BACKWARD_SPEC as _BACKWARD_SPEC  # noqa: F401  (registers)
from opgraft.ops.gelu import gelu
from opgraft.ops.linear_cross_entropy import linear_cross_entropy
from opgraft.ops.linear_scan import linear_scan
from opgraft.ops.out_variants import define as _define_out_variants
from opgraft.ops.registration import register_sharding_rules
from opgraft.ops.rms_norm import rms_norm
from opgraft.ops.rms_norm_fp8 import rms_norm_fp8
from opgraft.ops.selective_scan import selective_scan
from opgraft.ops.selective_scan_update import selective_scan_update, selective_scan_update_
from opgraft.ops.silu_mul_fp8 import silu_mul_fp8
from opgraft.patch import patch
from opgraft.registry import Cost, OpSpec, Sample, describe

__version__ = "0.1.0"
_out_variants = _define_out_variants()

if TYPE_CHECKING:
    from opgraft.compile import compile_options, sites

__all__ = [
    "Cost",
    "OpSpec",
    "Sample",
    "__version__",
    "add_rms_norm",
    "add_rms_norm_fp8",
    "causal_conv1d",
    "causal_conv1d_update",
    "causal_conv1d_update_",
    "compile_options",
    "cross_entropy",
    "describe",
    "gelu",
    "linear_cross_entropy",
    "linear_scan",
    "patch",
    "register_sharding_rules",
    "rms_norm",
    "rms_norm_fp8",
    "selective_scan",
    "selective_scan_update",
    "selective_scan_update_",
    "silu_mul_fp8",
    "sites",
]

# What needs torch's compiler is imported on first use: that import takes longer than all the rest.
_LAZY = frozenset(["compile_options", "sites"])


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        from opgraft import compile as _compile

        return getattr(_compile, name)
    raise AttributeError(f"module 'opgraft' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
