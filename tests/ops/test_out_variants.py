"""Overloads that take memory for their result: the same values, in that memory, and the compiler plans it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import opgraft
from opgraft._compat import plans_results
from opgraft.ops.out_variants import can_be_planned, schema_of
from opgraft.registry import OpSpec, specs

from table import calls, every_dtype, widened

pytestmark = pytest.mark.core

PLANNED = [spec for spec in specs("opgraft") if can_be_planned(spec.op._schema)]
every_planned_op = pytest.mark.parametrize("spec", PLANNED, ids=lambda spec: spec.name)
planned = pytest.mark.skipif(not plans_results(), reason="before 2.14 torch does not plan what ops return")


def out_overload(spec: OpSpec) -> Any:
    space, name = spec.name.split("::")
    return getattr(getattr(torch.ops, space), name).out


def test_which_ops_have_one() -> None:
    assert {spec.name for spec in PLANNED} == {
        "opgraft::gelu", "opgraft::gelu_backward", "opgraft::linear_scan", "opgraft::rms_norm",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "can"),
    [
        ("t::f(Tensor x, Tensor? w=None, float eps=1e-06) -> Tensor", True),
        ("t::f(Tensor x, Tensor? w, Tensor y) -> Tensor", False),
        ("t::f(Tensor x, Tensor? w, Tensor? b, int n) -> Tensor", False),
        ("t::f(Tensor x, int n, Tensor y) -> Tensor", False),
        ("t::f(Tensor x) -> (Tensor, Tensor)", False),
        ("t::f_(Tensor(a!) x) -> Tensor", False),
    ],
)
def test_an_op_has_one_where_torch_keeps_the_order_of_its_arguments(text: str, can: bool) -> None:
    assert can_be_planned(torch._C.parse_schema(text)) is can


def test_the_schema_is_that_of_the_op_with_the_memory() -> None:
    schema = torch.ops.opgraft.rms_norm.default._schema
    found = torch._C.parse_schema(schema_of(schema))
    assert [str(a.type) for a in found.arguments[:-1]] == [str(a.type) for a in schema.arguments]
    assert [a.default_value for a in found.arguments[:-1]] == [a.default_value for a in schema.arguments]
    assert found.arguments[-1].kwarg_only


def test_there_is_none_where_nothing_takes_it() -> None:
    assert ("out" in torch.ops.opgraft.gelu.overloads()) is plans_results()


@planned
@every_planned_op
@every_dtype
def test_the_result_lies_in_the_memory(spec: OpSpec, dtype: torch.dtype, device: torch.device) -> None:
    for sample in calls(spec, device, dtype):
        wanted = spec.op(*sample.args, **sample.kwargs)
        out = torch.empty_like(wanted)
        place = out.data_ptr()
        assert out_overload(spec)(*sample.args, **sample.kwargs, out=out).data_ptr() == place
        assert out.data_ptr() == place
        torch.testing.assert_close(widened(out), widened(wanted), rtol=0, atol=0, equal_nan=True, msg=sample.name)


@planned
@pytest.mark.parametrize("layout", ["transposed", "off 16 bytes"])
def test_memory_of_another_layout_is_filled_too(layout: str, device: torch.device) -> None:
    x = torch.randn(6, 5, device=device)
    memory = torch.full((31,), 7.0, device=device)
    out = memory[:30].view(5, 6).t() if layout == "transposed" else memory[1:].view(6, 5)
    torch.ops.opgraft.gelu.out(x, out=out)
    torch.testing.assert_close(out, opgraft.gelu(x))
    assert memory[-1 if layout == "transposed" else 0] == 7.0


@planned
@pytest.mark.parametrize("out", [torch.empty(3), torch.empty(6, 5, dtype=torch.float64)], ids=["shape", "dtype"])
def test_memory_that_does_not_fit_is_refused(out: torch.Tensor) -> None:
    with pytest.raises(RuntimeError, match=r"out overload: out has (shape|dtype)"):
        torch.ops.opgraft.gelu.out(torch.randn(6, 5), out=out)


@planned
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_it_can_be_compiled_itself(backend: str, device: torch.device) -> None:
    def filled(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        torch.ops.opgraft.gelu.out(x, out=out)
        return out * 2

    x, out = torch.randn(6, 5, device=device), torch.empty(6, 5, device=device)
    doubled = torch.compile(filled, backend=backend, fullgraph=True)(x, out)
    torch.testing.assert_close(out, opgraft.gelu(x))
    torch.testing.assert_close(doubled, out * 2)


@planned
@pytest.mark.parametrize("dynamic", [False, True])
def test_inductor_plans_the_result(dynamic: bool, device: torch.device) -> None:
    from torch._inductor.utils import run_and_get_code

    def chain(x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = opgraft.gelu((x @ x) * 2)
        return x

    x = torch.randn(32, 32, device=device)
    with torch.no_grad():
        found, code = run_and_get_code(torch.compile(chain, dynamic=dynamic), x)
    torch.testing.assert_close(found, chain(x), rtol=1e-4, atol=1e-4)
    text = "\n".join(code)
    assert text.count("torch.ops.opgraft.gelu.out(") == 3
    assert "# reuse" in text
