"""Custom ops inside compiled models: each used at the sites where it was measured faster, and nowhere else."""

from __future__ import annotations

from opgraft.compile.listing import sites
from opgraft.compile.options import compile_options

__all__ = ["compile_options", "sites"]
