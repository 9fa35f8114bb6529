"""What the rules of recurrences take for their op: loops unrolled, scans whole and taken apart; and what they leave."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from stand_ins import all_ops  # noqa: F401

import opgraft
from opgraft.compile import stretch
from opgraft.compile.change import Change
from opgraft.compile.find import find_sites
from opgraft.compile.scope import scopes

from idioms import check, sites_of
from models import captured, without_inductor

pytestmark = pytest.mark.usefixtures("all_ops")


def loop_and_stack(a: Any, b: Any) -> Any:
    h, states = torch.zeros_like(b[:, 0]), []
    for t in range(a.shape[1]):
        h = a[:, t] * h + b[:, t]
        states.append(h)
    return torch.stack(states, dim=1)


def mamba_loop(a: Any, b: Any) -> Any:
    """As transformers' Mamba walks: the state is read at every step."""
    state, outputs = torch.zeros(a.shape[0], a.shape[2]), []
    for i in range(a.shape[1]):
        state = a[:, i, :] * state + b[:, i, :]
        outputs.append((state * 2).sum(-1))
    return torch.stack(outputs, dim=-1)


def from_the_first(a: Any, b: Any) -> Any:
    h = b.select(1, 0)
    states = [h]
    for t in range(1, a.shape[1]):
        h = b.select(1, t) + h * a.select(1, t)
        states.append(h)
    return torch.stack(states, 0)


def backwards(a: Any, b: Any) -> Any:
    """Discounted sums, from the end."""
    h, states = torch.zeros_like(b[:, 0]), []
    for t in reversed(range(a.shape[1])):
        h = b[:, t] + a[:, t] * h
        states.insert(0, h)
    return torch.stack(states, 1)


def last_state(a: Any, b: Any) -> Any:
    h = torch.ones_like(b[:, 0]) * 0.5
    for x, y in zip(a.unbind(1), b.unbind(1), strict=True):
        h = x * h + y
    return h


LOOPS = {f.__name__: f for f in (loop_and_stack, mamba_loop, from_the_first, backwards, last_state)}


@pytest.mark.parametrize("name", LOOPS)
def test_an_unrolled_recurrence_is_one_site(name: str) -> None:
    inputs = (torch.rand(2, 6, 5), torch.randn(2, 6, 5))
    check(lambda a, b: LOOPS[name](a * 0.5, b) + 1, inputs, "recurrence", tolerance=1e-4)


def one_step_left_out(a: Any, b: Any) -> Any:
    h = torch.zeros_like(b[:, 0])
    for t in (0, 1, 2, 4, 5):
        h = a[:, t] * h + b[:, t]
    return h


def another_order(a: Any, b: Any) -> Any:
    h, states = torch.zeros_like(b[:, 0]), []
    for t in range(a.shape[1]):
        h = a[:, t] * h + b[:, -1 - t]
        states.append(h)
    return torch.stack(states, 1)


def not_linear(a: Any, b: Any) -> Any:
    h, states = torch.zeros_like(b[:, 0]), []
    for t in range(a.shape[1]):
        h = torch.tanh(a[:, t] * h + b[:, t])
        states.append(h)
    return torch.stack(states, 1)


@pytest.mark.parametrize("loop", [one_step_left_out, another_order, not_linear], ids=lambda f: f.__name__)
def test_another_recurrence_is_left_alone(loop: Callable[..., Any]) -> None:
    assert sites_of(loop, (torch.rand(2, 6, 5), torch.randn(2, 6, 5)), "recurrence") == []


def combine(left: Any, right: Any) -> Any:
    return left[0] * right[0], right[0] * left[1] + right[1]


def combine_otherwise(left: Any, right: Any) -> Any:
    return left[0] * right[0], left[0] * right[1] + left[1]


def scan(function: Callable[..., Any], mode: str) -> Callable[..., Any]:
    from torch._higher_order_ops.associative_scan import associative_scan

    return lambda a, b: associative_scan(function, (a * 0.5, b * 1), dim=1, combine_mode=mode)[1] + 1


@pytest.mark.parametrize("length", [2, 3, 8, 13])
def test_an_associative_scan_taken_apart_is_one_site(length: int) -> None:
    inputs = (torch.rand(2, length, 5), torch.randn(2, length, 5))
    check(scan(combine, "generic"), inputs, "unrolled-scan", tolerance=1e-4)


def higher_order(function: Callable[..., Any], dim: int) -> Callable[..., Any]:
    """The op itself, as Dynamo keeps it on a GPU: dimension 0 is scanned, and is a view of the one that is meant."""
    from torch._higher_order_ops.associative_scan import associative_scan_op

    def flat(a: Any, b: Any, c: Any, d: Any) -> Any:
        return list(function((a, b), (c, d)))

    def scanned(a: Any, b: Any) -> Any:
        pairs = [(a * 0.5).movedim(dim, 0), (b * 1).movedim(dim, 0)]
        products, states = associative_scan_op(flat, pairs, ())
        products.movedim(0, dim)  # as the public function leaves it: made and never read
        return states.movedim(0, dim) + 1

    return scanned


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_an_associative_scan_is_one_site(dim: int) -> None:
    function, (a, b) = higher_order(combine, dim), (torch.rand(3, 8, 5), torch.randn(3, 8, 5))
    (report,) = opgraft.sites(function, (a, b), choose="kernel")
    assert (report.idiom, report.chosen) == ("associative-scan", True), str(report)
    h, steps = torch.zeros(b.movedim(dim, 0).shape[1:]), []
    for decay, update in zip(a.movedim(dim, 0), b.movedim(dim, 0), strict=True):
        steps.append(h := decay * 0.5 * h + update)
    want = torch.stack(steps, dim) + 1
    torch.testing.assert_close(without_inductor(function, "kernel")(a, b), want)
    module = captured(function, a, b)
    (site,) = find_sites(module.graph)
    found = stretch.around(site, [Change(site)], scopes(module.graph))
    assert found is not None
    torch.testing.assert_close(found.graph(chosen=True)(a, b)[-1], want)


def test_an_associative_scan_whose_products_are_wanted_is_left_alone() -> None:
    from torch._higher_order_ops.associative_scan import associative_scan_op

    def function(a: Any, b: Any) -> Any:
        products, states = associative_scan_op(lambda a, b, c, d: [a * c, c * b + d], [a * 1, b * 1], ())
        return products.movedim(0, 1) + states.movedim(0, 1)

    assert sites_of(function, (torch.rand(8, 2), torch.randn(8, 2))) == []
    assert sites_of(higher_order(combine_otherwise, 1), (torch.rand(2, 8), torch.randn(2, 8))) == []


def test_another_associative_scan_is_left_alone() -> None:
    inputs = (torch.rand(2, 8, 5), torch.randn(2, 8, 5))
    assert sites_of(scan(combine_otherwise, "generic"), inputs) == []


@pytest.mark.parametrize("name", ["taken apart", "loop_and_stack", "mamba_loop", "backwards"])
def test_a_recurrence_is_checked_against_float64_and_differentiated(name: str) -> None:
    function = scan(combine, "generic") if name == "taken apart" else LOOPS[name]
    a, b = torch.rand(2, 6, 5, requires_grad=True), torch.randn(2, 6, 5, requires_grad=True)
    (site,) = opgraft.sites(function, (a, b), choose="kernel")
    assert site.chosen, site.decision.why
    got, want = without_inductor(function, "kernel")(a, b), function(a, b)
    torch.testing.assert_close(got, want)
    seed = torch.randn_like(want)
    torch.testing.assert_close(torch.autograd.grad(got, (a, b), seed), torch.autograd.grad(want, (a, b), seed))
