"""Tensors and sizes behind the star of a schema are arguments like any other."""

from __future__ import annotations

import os
from unittest import mock

import pytest
import torch

from opgraft.diagnostics import _compat
from opgraft.diagnostics.conform.lab.case import Case
from opgraft.diagnostics.conform.lab.examine import Check, examine
from opgraft.diagnostics.conform.lab.facts import facts_of
from opgraft.diagnostics.conform.lab.plan import Plan
from opgraft.diagnostics.model import Finding
from opgraft.registry import resolve

lib = torch.library.Library("behind_the_star", "DEF")
CHECKS = ("pickling", "not_exportable", "compiled", "vmap", "functional_copy", "fake_specializes")


def define(schema: str, kernel: object, fake: object, dispatch: str = "CPU") -> None:
    lib.define(schema)
    name = schema.partition("(")[0]
    lib.impl(name, kernel, dispatch)
    torch.library.register_fake(f"behind_the_star::{name}", fake, lib=lib)


def put(x: torch.Tensor, *, out: torch.Tensor) -> None:
    out.copy_(x)


define("scaled(Tensor x, *, Tensor by) -> Tensor", lambda x, *, by: x * by, lambda x, *, by: torch.empty_like(x))
define("put(Tensor x, *, Tensor(a!) out) -> ()", put, lambda x, *, out: None)
define("rows(Tensor x, *, int count) -> Tensor", lambda x, *, count: x[:count] * 1, lambda x, *, count: x[:count] * 1)
# Its fake knows another layout than its kernel gives, which shows where code is compiled.
define("turned(Tensor x, *, Tensor by) -> Tensor", lambda x, *, by: (x * by).t(), lambda x, *, by: torch.empty_like(x))

CASES = {
    "scaled": Case((torch.randn(4, 6),), {"by": torch.randn(4, 6)}, origin="sample"),
    "put": Case((torch.randn(4, 6),), {"out": torch.zeros(4, 6)}, origin="sample"),
    "rows": Case((torch.randn(4, 6),), {"count": 3}, origin="sample"),
    "turned": Case((torch.randn(6, 6),), {"by": torch.randn(6, 6)}, origin="sample"),
}


def found(name: str, *checks: str) -> list[Finding]:
    """What is more than a note; a check that was not made is a failure."""
    plan = Plan(facts=facts_of(resolve(f"behind_the_star::{name}")), cases=(CASES[name],), seconds=240.0)
    with mock.patch.dict(os.environ):
        _compat.load_compiler()
    findings, results = examine(plan, [Check(check) for check in checks])
    assert [result.detail for result in results if result.outcome == "not-run"] == []
    return [finding for finding in findings if finding.severity != "note"]


@pytest.mark.parametrize("name", ["scaled", "put"])
def test_an_op_with_such_a_tensor_is_clean(name: str) -> None:
    assert [finding.message for finding in found(name, *CHECKS)] == []


def test_a_size_there_compiles_again() -> None:
    (finding,) = found("rows", "fake_specializes")
    assert "count is a size" in finding.message


def test_compiled_code_is_compared() -> None:
    assert found("turned", "compiled")
