"""The checks in the order in which they run: what is cheap and explains the most comes first."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

from opgraft.diagnostics.conform.lab.bench import Fault

CHECKS: tuple[str, ...] = (
    "missing_kernel",
    "composite_kernel",
    "bad_schema",
    "undeclared_mutation",
    "overdeclared_mutation",
    "output_alias",
    "unstable_result",
    "out_of_bounds",
    "missing_fake",
    "fake_mismatch",
    "fake_specializes",
    "data_dependent_shape",
    "layout_assumed",
    "misaligned",
    "empty_input",
    "index_overflow",
    "wrong_value",
    "missing_autograd",
    "gradient_layout",
    "wrong_gradient",
    "double_backward",
    "autocast",
    "dropped_effect",
    "wrong_stream",
    "hidden_sync",
    "unchecked_launch",
    "wrong_device",
    "cudagraph_skip",
    "opcheck",
    "vmap",
    "sharding",
    "not_exportable",
    "pickling",
    "compiled",
    "kernel_not_run",
    "cache_bypass",
    "layout_copy",
    "functional_copy",
    "aotinductor",
)
# What costs a compile, or asks about more than one call needs: left out for calls that were met in a run.
ON_REQUEST = frozenset(
    (
        "opcheck",
        "vmap",
        "sharding",
        "not_exportable",
        "pickling",
        "compiled",
        "kernel_not_run",
        "cache_bypass",
        "layout_copy",
        "functional_copy",
        "wrong_device",
        "aotinductor",
    )
)


class Check:
    """One check: its name, the kind of its findings, and the function that yields faults."""

    def __init__(self, name: str) -> None:
        self.name = name.replace("_", "-")
        self.module: Any = importlib.import_module(f"opgraft.diagnostics.conform.{name}")
        self.kind: str = self.module.KIND

    def run(self, bench: Any) -> Iterator[Fault]:
        found: Iterator[Fault] = self.module.check(bench)
        return found


def checks(recorded: bool) -> tuple[Check, ...]:
    """Every check, or those that suit calls which were met in a run."""
    return tuple(Check(name) for name in CHECKS if not (recorded and name in ON_REQUEST))
