"""Inductor (2.14 and newer) calls an overload tagged ``out`` in an op's place: it counts as the op, and as a fault."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch

from opgraft._compat import plans_results
from opgraft.diagnostics import _compat
from opgraft.diagnostics.conform.lab.case import Case
from opgraft.diagnostics.conform.lab.examine import Check, examine
from opgraft.diagnostics.conform.lab.facts import facts_of
from opgraft.diagnostics.conform.lab.plan import Plan
from opgraft.diagnostics.model import Finding
from opgraft.registry import resolve

pytestmark = [
    pytest.mark.core,
    pytest.mark.skipif(not plans_results(), reason="before 2.14 torch does not plan what ops return"),
]
NS = "planned_results"
lib = torch.library.Library(NS, "DEF")


def define(name: str, arguments: str, kernel: Callable[..., torch.Tensor]) -> None:
    """An op with one result like its first argument, and the overload that takes memory for it."""

    def into(*args: Any, out: torch.Tensor) -> torch.Tensor:
        return out.copy_(kernel(*args))

    lib.define(f"{name}({arguments}) -> Tensor")
    lib.define(f"{name}.out({arguments}, *, Tensor(a!) out) -> Tensor(a!)", tags=(torch.Tag.out,))
    lib.impl(name, kernel, "CPU")
    lib.impl(f"{name}.out", into, "CPU")
    torch.library.register_fake(f"{NS}::{name}", lambda x, *rest: torch.empty_like(x), lib=lib)
    torch.library.register_fake(f"{NS}::{name}.out", lambda *args, out: out, lib=lib)


define("added", "Tensor x, Tensor y, int n", lambda x, y, n: x + n * y)
# Inductor's code passes all tensors first and None after them: another order than the schema's.
define("weighed", "Tensor x, Tensor? w, Tensor y, int n", lambda x, w, y, n: x * (1 if w is None else w) + n * y)


def found(name: str, *args: Any) -> list[Finding]:
    plan = Plan(facts=facts_of(resolve(f"{NS}::{name}")), cases=(Case(args, origin="sample"),), seconds=240.0)
    with mock.patch.dict(os.environ):
        _compat.load_compiler()
    findings, results = examine(plan, [Check("compiled"), Check("kernel_not_run")])
    assert "the check itself failed" not in " ".join(result.detail for result in results)
    return [finding for finding in findings if finding.severity != "note"]


def test_the_overload_counts_as_the_op() -> None:
    assert [finding.message for finding in found("added", torch.randn(4, 6), torch.randn(4, 6), 2)] == []


def test_a_fault_names_the_overload() -> None:
    (finding,) = found("weighed", torch.randn(4, 6), None, torch.randn(4, 6), 2)
    assert finding.kind == "compiler-bug"
    assert any("weighed.out in its place" in line for line in finding.evidence)
