"""Whatever goes wrong at a site costs that site alone: the model compiles and gives the compiler's result."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import opgraft
from opgraft import registry
from opgraft.compile import timing
from opgraft.compile.find import find_sites
from opgraft.compile.store import Store

from models import Perceptron, captured, fake_times, one_warning, without_inductor


def kernel_of(fault: str, x: torch.Tensor) -> torch.Tensor:
    if fault == "raises":
        raise RuntimeError("no kernel image is available\nfor execution")
    right = x.sin()
    if fault == "wrong value" or (fault == "wrong at seven" and x.shape[-1] == 7):
        return right * 1.01
    return right.masked_fill(x > 1, float("nan")) if fault == "not a number" else right


@pytest.fixture
def faulty(request: pytest.FixtureRequest) -> Iterator[Any]:
    """A described op ``opgraft_test::sin`` with a fault in its kernel."""
    fault = request.param
    with torch.library._scoped_library("opgraft_test", "FRAGMENT") as library:
        library.define("sin(Tensor x) -> Tensor")
        library.impl("sin", lambda x: kernel_of(fault, x), "CPU")
        torch.library.register_fake("opgraft_test::sin", torch.empty_like, lib=library)
        torch.library.register_autograd(
            "opgraft_test::sin",
            lambda ctx, g: g * ctx.saved_tensors[0].cos(),
            setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
            lib=library,
        )
        opgraft.describe("opgraft_test::sin", torch.sin)
        yield torch.ops.opgraft_test.sin
        registry._TABLE.pop("opgraft_test::sin", None)


@pytest.mark.parametrize("faulty", ["raises", "wrong value", "not a number"], indirect=True)
@pytest.mark.parametrize("choose", ["kernel", "measured"])
def test_a_faulty_kernel_is_left_out_and_named(faulty: Any, choose: str) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return faulty(x * 2) + 1

    x = torch.randn(40, 5)
    with one_warning("opgraft_test::sin at "):
        got = without_inductor(function, choose)(x)
    torch.testing.assert_close(got, (x * 2).sin() + 1)


@pytest.mark.parametrize("faulty", ["wrong at seven"], indirect=True)
def test_a_fault_at_one_site_costs_that_site_alone(faulty: Any) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return faulty(F.pad(faulty(x * 2), (1, 1)) + 1)

    x = torch.randn(40, 5)
    with one_warning("opgraft_test::sin at "):
        got = without_inductor(function, "kernel")(x)
    torch.testing.assert_close(got, (F.pad((x * 2).sin(), (1, 1)) + 1).sin())


@pytest.mark.parametrize("choose", ["kernel", "measured"])
def test_a_kernel_whose_backward_cannot_be_traced_is_left_out_and_named(choose: str) -> None:
    """It runs, and with the right values; only the compile of the whole model would fail in it."""
    with torch.library._scoped_library("opgraft_test_backward", "FRAGMENT") as library:
        for name, meaning in (("sin", torch.sin), ("slope", torch.cos)):
            library.define(f"{name}(Tensor x) -> Tensor")
            library.impl(name, meaning, "CPU")
        torch.library.register_fake("opgraft_test_backward::sin", torch.empty_like, lib=library)
        torch.library.register_autograd(
            "opgraft_test_backward::sin",
            lambda ctx, g: g * torch.ops.opgraft_test_backward.slope(ctx.saved_tensors[0]),
            setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
            lib=library,
        )
        opgraft.describe("opgraft_test_backward::sin", torch.sin)

        def function(x: torch.Tensor) -> torch.Tensor:
            return torch.ops.opgraft_test_backward.sin(x * 2) + 1

        x = torch.randn(40, 5, requires_grad=True)
        with one_warning("opgraft_test_backward::sin at "):
            got = without_inductor(function, choose)(x)
        (gradient,) = torch.autograd.grad(got.sum(), x)
        torch.testing.assert_close(gradient, 2 * (x * 2).cos())
        registry._TABLE.pop("opgraft_test_backward::sin")


@pytest.mark.parametrize("faulty", [""], indirect=True)
def test_a_sound_described_op_is_served(faulty: Any) -> None:
    x = torch.randn(40, 5, requires_grad=True)
    for choose in ("kernel", "compiler"):
        got = without_inductor(lambda x: faulty(x * 2), choose)(x)
        torch.testing.assert_close(got, (x * 2).sin())
        (gradient,) = torch.autograd.grad(got.sum(), x)
        torch.testing.assert_close(gradient, 2 * (x * 2).cos())


@pytest.mark.parametrize("choose", ["kernel", "measured", "compiler"])
def test_sizes_that_depend_on_data(choose: str) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        chosen = x[x > 0]
        return opgraft.gelu(chosen * 2) + F.gelu(chosen, approximate="tanh")

    x = torch.randn(40)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        got = without_inductor(function, choose)(x)
    torch.testing.assert_close(got, function(x))


def test_a_graph_with_unknown_ops_around() -> None:
    with torch.library._scoped_library("opgraft_test_unknown", "FRAGMENT") as library:
        library.define("mystery(Tensor x, Tensor(a!) y) -> Tensor")
        library.impl("mystery", lambda x, y: x + y.add_(1), "CPU")
        torch.library.register_fake("opgraft_test_unknown::mystery", lambda x, y: torch.empty_like(x), lib=library)

        def function(x: torch.Tensor) -> torch.Tensor:
            y = x * 3
            z = torch.ops.opgraft_test_unknown.mystery(opgraft.gelu(x * 2), y)
            return F.gelu(z, approximate="tanh") + y

        x = torch.randn(8, 4)
        for choose in ("kernel", "compiler"):
            torch.testing.assert_close(without_inductor(function, choose)(x), function(x))


def test_an_op_that_writes_is_no_site() -> None:
    with torch.library._scoped_library("opgraft_test_writes", "FRAGMENT") as library:
        library.define("fill(Tensor(a!) x) -> Tensor")
        library.impl("fill", lambda x: x.fill_(1).clone(), "CPU")
        torch.library.register_fake("opgraft_test_writes::fill", torch.empty_like, lib=library)
        opgraft.describe("opgraft_test_writes::fill", torch.ones_like)
        graph = captured(lambda x: torch.ops.opgraft_test_writes.fill(x * 1), torch.randn(3))
        assert find_sites(graph.graph) == []
        registry._TABLE.pop("opgraft_test_writes::fill")


def test_a_reference_that_cannot_stand_there_leaves_the_op(recwarn: pytest.WarningsRecorder) -> None:
    with torch.library._scoped_library("opgraft_test_long", "FRAGMENT") as library:
        library.define("f(Tensor x) -> Tensor")
        library.impl("f", lambda x: x + 600, "CPU")
        torch.library.register_fake("opgraft_test_long::f", torch.empty_like, lib=library)

        def reference(x: torch.Tensor) -> torch.Tensor:
            for _ in range(600):
                x = x + 1
            return x

        opgraft.describe("opgraft_test_long::f", reference)
        x = torch.zeros(3)
        (site,) = opgraft.sites(lambda x: torch.ops.opgraft_test_long.f(x), x)
        assert site.chosen
        assert "operations long" in site.decision.why
        torch.testing.assert_close(without_inductor(lambda x: torch.ops.opgraft_test_long.f(x), "compiler")(x), x + 600)
        registry._TABLE.pop("opgraft_test_long::f")


def test_a_surrogate_gradient_stays_the_ops() -> None:
    """The reference would bring another gradient than the one that the op's author wants."""
    with torch.library._scoped_library("opgraft_test_surrogate", "FRAGMENT") as library:
        library.define("step(Tensor x) -> Tensor")
        library.impl("step", lambda x: (x > 0).to(x.dtype), "CPU")
        torch.library.register_fake("opgraft_test_surrogate::step", torch.empty_like, lib=library)
        torch.library.register_autograd("opgraft_test_surrogate::step", lambda ctx, g: g * 2, lib=library)
        opgraft.describe("opgraft_test_surrogate::step", lambda x: (x > 0).to(x.dtype), surrogate=True)

        def function(x: torch.Tensor) -> torch.Tensor:
            return torch.ops.opgraft_test_surrogate.step(x * 1)

        x = torch.randn(3, requires_grad=True)
        (site,) = opgraft.sites(function, x, choose="compiler")
        assert "surrogate" in site.decision.why
        (gradient,) = torch.autograd.grad(without_inductor(function, "compiler")(x).sum(), x)
        torch.testing.assert_close(gradient, torch.full_like(x, 2))
        registry._TABLE.pop("opgraft_test_surrogate::step")


def test_a_store_that_cannot_be_used(tmp_path: Any) -> None:
    (tmp_path / "file").write_text("")
    with one_warning("cannot be written"):
        first = opgraft.sites(Perceptron(), torch.randn(6, 16), store=Store(tmp_path / "file" / "store"))
    assert len(first) == 1


@pytest.mark.parametrize("fault", ["full", "read only"])
def test_a_store_that_cannot_be_written_while_a_model_compiles(
    fault: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any) -> None:
        raise OSError(errno.ENOSPC if fault == "full" else errno.EROFS, "no")

    monkeypatch.setattr(timing, "interleave", fake_times(2.0, 1.0))
    monkeypatch.setattr("opgraft.compile.store.os.replace", refuse)
    model, x = Perceptron(), torch.randn(6, 16)
    with one_warning("cannot be written"):
        compiled = torch.compile(model, options=opgraft.compile_options(store=tmp_path))
        torch.testing.assert_close(compiled(x), model(x))


@pytest.mark.parametrize("choose", ["kernel", "compiler"])
def test_an_op_with_several_results_is_a_site(choose: str) -> None:
    def function(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return opgraft.causal_conv1d(x * 2, weight) + 1

    x, weight = torch.randn(2, 8, 64), torch.randn(8, 4)
    (site,) = opgraft.sites(function, (x, weight), choose=choose)
    assert site.decision.choice == choose
    assert choose in site.decision.why
    torch.testing.assert_close(without_inductor(function, choose)(x, weight), function(x, weight))
