"""The second look at a choice: the stretch of the model around a site, as given and as chosen."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import opgraft
from opgraft.compile import measure, stretch, timing
from opgraft.compile.find import find_sites
from opgraft.compile.mutation import writes
from opgraft.compile.scope import scopes
from opgraft.compile.stretch import Change

from models import Perceptron, captured, fake_times, gelu_amid, models, without_inductor

pytestmark = pytest.mark.own_second_look


def times(given: float, chosen: float) -> Callable[..., timing.Samples]:
    """In place of ``measure.confirm``."""
    return lambda *args, **options: timing.Samples(((given, chosen, chosen, given),) * 11)


@pytest.mark.parametrize(("chosen", "choice"), [(0.9, "kernel"), (1.0, "compiler"), (1.1, "compiler")])
def test_a_kernel_for_an_idiom_must_make_the_model_faster(
    chosen: float, choice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timing, "interleave", fake_times(2.0, 1.0))
    monkeypatch.setattr(measure, "confirm", times(1.0, chosen))
    (site,) = opgraft.sites(models()["idiom"], torch.randn(6, 16))
    assert site.decision.choice == choice
    assert ("but the model around it is not faster" in site.decision.why) == (choice == "compiler")


@pytest.mark.parametrize(
    ("alone", "without", "choice"),
    [
        ("compiler", 1.0, "compiler"),
        ("compiler", 1.1, "kernel"),
        ("compiler", 0.9, "compiler"),
        ("kernel", 1.0, "kernel"),
        ("kernel", 0.9, "compiler"),
    ],
)
def test_an_op_that_the_model_calls_stays_where_the_model_says_so(
    alone: str, without: float, choice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timing, "interleave", fake_times(*((2.0, 1.0) if alone == "kernel" else (1.0, 2.0))))
    monkeypatch.setattr(measure, "confirm", times(1.0, without))
    (site,) = opgraft.sites(Perceptron(), torch.randn(6, 16))
    assert site.decision.choice == choice


@pytest.mark.parametrize(("chosen", "choice"), [(0.9, "kernel"), (0.985, "compiler"), (1.0, "compiler")])
def test_a_kernel_that_loses_in_its_surroundings_may_win_in_the_model(
    chosen: float, choice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a norm with the sum before it and the norm alone, found in one place, one at most is served."""
    monkeypatch.setattr("opgraft.compile.looks._DOUBTED", {"cpu": 0.0})
    monkeypatch.setattr(timing, "interleave", fake_times(1.0, 2.0))
    monkeypatch.setattr(measure, "confirm", times(1.0, chosen))
    found = opgraft.sites(models()["idiom"], torch.randn(6, 16), tune_seconds=600.0)
    assert [site.decision.choice for site in found] == [choice]
    assert ("but the model around it is faster" in found[0].decision.why) == (choice == "kernel")

    def norms(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = x + x.sin()
            x = x + w * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))
        return x

    inputs = torch.randn(3, 16), torch.rand(16)
    served = [s for s in opgraft.sites(norms, inputs, tune_seconds=600.0) if s.chosen]
    assert [s.idiom for s in served] == ["add-rms-norm"] * (2 if choice == "kernel" else 0)
    torch.testing.assert_close(without_inductor(norms, "measured")(*inputs), norms(*inputs))


def test_a_second_process_takes_the_same_word_from_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "interleave", fake_times(2.0, 1.0))
    monkeypatch.setattr(measure, "confirm", times(1.0, 1.0))
    model, x = models()["idiom"], torch.randn(6, 16)
    first = opgraft.sites(model, x)

    def never(*args: Any, **options: Any) -> timing.Samples:
        raise AssertionError("measured again")

    monkeypatch.setattr(measure, "confirm", never)
    monkeypatch.setattr(timing, "interleave", never)
    assert [s.decision for s in opgraft.sites(model, x)] == [s.decision for s in first]


def test_one_look_serves_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[int] = []

    def count(found: stretch.Stretch, **options: Any) -> timing.Samples:
        looks.append(len(found.changes))
        return times(1.0, 0.5)()

    monkeypatch.setattr(timing, "interleave", fake_times(2.0, 1.0))
    monkeypatch.setattr(measure, "confirm", count)
    model = nn.Sequential(*(models()["idiom"] for _ in range(60)))
    found = opgraft.sites(model, torch.randn(6, 16))
    assert len(found) == 60
    assert all(site.chosen for site in found)
    assert len(looks) == 2, "at a stretch, and at the whole graph"
    assert 10 < looks[0] < looks[1] == 60, "the stretch holds about as many sites as fit into it"


def test_a_stretch_is_measured_and_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the real second look: both forms compile and run, forward and backward."""
    monkeypatch.setattr(timing, "interleave", fake_times(2.0, 1.0))
    model, x = models()["written out"], torch.randn(6, 16)
    (site,) = opgraft.sites(model, x)
    assert site.chosen, site.decision.why
    compiled = without_inductor(model, "measured")
    torch.testing.assert_close(compiled(x), model(x))


def pieces(function: Callable[..., Any], *inputs: Any) -> stretch.Stretch | None:
    graph = captured(function, *inputs).graph
    (site,) = find_sites(graph)
    return stretch.around(site, [Change(site)], scopes(graph))


def test_the_whole_of_a_short_graph() -> None:
    w = torch.randn(8, 8)
    found = pieces(lambda x, w: (F.gelu(x @ w, approximate="tanh") @ w).relu().sum(), torch.randn(4, 8), w)
    assert found is not None
    assert len(found.nodes) == 5
    x, weight = torch.randn(4, 8), w
    torch.testing.assert_close(found.graph(chosen=True)(x, weight)[0], found.graph(chosen=False)(x, weight)[0])


def test_it_ends_at_writes_and_at_other_scopes() -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> Any:
        a = x.sin()
        y.add_(1)
        b = F.gelu(a * 2, approximate="tanh").cos()
        with torch.no_grad():
            c = b.exp()
        return c + b

    found = pieces(function, torch.randn(4, 8), torch.randn(4, 8))
    assert found is not None
    names = [str(n.target) for n in found.nodes]
    assert not any("add_" in n or "exp" in n or n == "sin" for n in names)


def test_what_does_not_fit_into_memory_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    from opgraft import _compat

    monkeypatch.setattr(timing, "interleave", fake_times(2.0, 1.0))
    monkeypatch.setattr(_compat, "free_memory", lambda device: 1000)
    (site,) = opgraft.sites(models()["idiom"], torch.randn(6, 16))
    assert not site.chosen
    assert "does not fit into memory" in site.decision.why


def test_a_change_that_stands_is_timed_again_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    w = torch.randn(8, 8)
    found = pieces(lambda x, w: (F.gelu(x @ w, approximate="tanh") @ w).relu(), torch.randn(4, 8), w)
    assert found is not None
    answers = [timing.Samples(((2.0, 1.0, 1.0, 2.0),) * 9), timing.Samples(((1.0, 1.0, 1.0, 1.0),) * 9)]
    addresses = []

    def timed(steps: Any, device: str, seconds: float, enough: Any) -> timing.Samples:
        for step in steps:
            step()
        return answers[len(addresses) - 1]

    made = measure.inputs.make

    def recorded(*args: Any, **options: Any) -> Any:
        tensors = made(*args, **options)
        addresses.append({t.data_ptr() for t in tensors})
        return tensors

    monkeypatch.setattr(measure, "_timed", timed)
    monkeypatch.setattr(measure.inputs, "make", recorded)
    last = measure.confirm(found, seconds=0.01, is_kept=lambda samples: timing.judge(samples).second_is_faster)
    assert last is answers[1]
    assert len(addresses) == 2
    assert not addresses[0] & addresses[1]


@pytest.mark.parametrize(
    ("on_device", "on_host", "a_call", "lost"),
    [(1.0, 1e-4, 1e-4, None), (1.1, 1e-4, 1.0, "device"), (0.9, 1.5e-4, 1e-4, "host"), (0.9, 1.5e-4, 1e-3, None)],
)
def test_a_gain_must_not_be_a_loss_on_the_device_or_on_a_host_that_may_be_the_limit(
    monkeypatch: pytest.MonkeyPatch, on_device: float, on_host: float, a_call: float, lost: str | None
) -> None:
    """Seconds of the change; without it a second on the device, and a tenth of a millisecond on the host."""

    def samples(before: float, after: float) -> timing.Samples:
        return timing.Samples(((before, after, after, before),) * 11)

    answers = {"device": samples(1.0, on_device), "host": samples(1e-4, on_host)}
    monkeypatch.setattr(measure, "_replays", lambda steps: steps)
    monkeypatch.setattr(measure, "_timed", lambda *args: answers["device"])
    monkeypatch.setattr(timing, "until_returned", lambda *steps, **options: answers["host"])
    found = measure._lost_on_one_side([lambda: None, lambda: None], samples(1.1 * a_call, a_call), 0.01)
    assert found is (answers[lost] if lost else None)


@pytest.mark.parametrize(
    ("name", "writing"),
    [("and_", False), ("or_", False), ("not_", False), ("is_", False), ("invert", False), ("iand", True), ("ior", True),
     ("iadd", True), ("setitem", True)],
)  # fmt: skip
def test_which_operators_write(name: str, writing: bool) -> None:
    graph = torch.fx.Graph()
    assert writes(graph.call_function(getattr(operator, name))) is writing


@pytest.mark.parametrize(
    ("name", "writing"), [("__invert__", False), ("__and__", False), ("__ior__", True), ("add_", True)]
)
def test_which_methods_write(name: str, writing: bool) -> None:
    assert writes(torch.fx.Graph().call_method(name)) is writing


def test_regions_without_effect_do_not_end_it() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", enabled=False):
            a = x.sin()
        b = F.gelu(a * 2, approximate="tanh").cos()
        with torch.autocast("cpu", torch.bfloat16):
            return b.exp() @ b

    found = pieces(function, torch.randn(8, 8))
    assert found is not None
    assert str(found.nodes[0].target) == "sin"
    assert "exp" not in [str(n.target) for n in found.nodes]
    with torch.autocast("cpu", torch.bfloat16):
        within = pieces(function, torch.randn(8, 8))
    assert within is not None
    assert "sin" not in [str(n.target) for n in within.nodes]


def test_levels_of_vmap_are_run_whole() -> None:
    from torch._higher_order_ops.associative_scan import associative_scan

    def function(x: torch.Tensor, decay: torch.Tensor) -> torch.Tensor:
        y = F.gelu(x * 2, approximate="tanh")
        states = associative_scan(lambda a, b: (a[0] * b[0], a[1] * b[0] + b[1]), (decay, y), 0, combine_mode="generic")
        return states[1].cos()

    x, decay = torch.randn(16, 4), torch.rand(16, 4)
    graph = captured(function, x, decay).graph
    level = [n for n in graph.nodes if "vmap" in n.name]
    site = next(s for s in find_sites(graph) if s.idiom == "tanh-gelu")
    found = stretch.around(site, [Change(site)], scopes(graph))
    assert found is not None
    assert level
    assert str(found.nodes[-1].target) == "cos"
    inputs = [{"x": x, "decay": decay}[next(k for k in ("decay", "x") if k in n.name)] for n, _ in found.inputs]
    torch.testing.assert_close(found.graph(chosen=True)(*inputs)[0], function(x, decay))


def test_a_longer_stretch_decides_where_surroundings_and_stretch_disagree(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: list[int] = []

    def confirm(found: stretch.Stretch, **options: Any) -> timing.Samples:
        lengths.append(len(found.nodes))
        after = 0.9 if len(found.nodes) > 12 else 1.1
        return timing.Samples(((1.0, after, after, 1.0),) * 11)

    def function(x: torch.Tensor) -> torch.Tensor:
        return gelu_amid(20, x)

    monkeypatch.setattr(stretch, "MOST_NODES", 10)
    monkeypatch.setattr(stretch.around, "__defaults__", (10,))
    monkeypatch.setattr(timing, "interleave", fake_times(2.0, 1.0))
    monkeypatch.setattr(measure, "confirm", confirm)
    (site,) = opgraft.sites(function, torch.randn(6, 16))
    assert len(lengths) == 2
    assert lengths[0] < 12 < lengths[1]
    assert site.chosen
