"""Many sites of one graph rewritten together: one's result may be another's argument, and one that cannot be rewritten
leaves the others and the graph alone."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from stand_ins import all_ops  # noqa: F401

import opgraft
from opgraft.compile import checking, rules, stretch
from opgraft.compile.change import Change, make_all, rehearsed
from opgraft.compile.find import find_sites
from opgraft.compile.neighbourhood import around
from opgraft.compile.scope import scopes

from models import captured, one_warning, without_inductor

pytestmark = pytest.mark.usefixtures("all_ops")


def norm(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return w * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def layers(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Residual, norm, activation, and again: every site reads what the site before gave, one of two results."""
    for _ in range(3):
        x = x + opgraft.gelu(norm(x, w) * 2)
        x = x + F.gelu(norm(x, w), approximate="tanh")
    return norm(x, w)


INPUTS = (torch.randn(3, 16), torch.rand(16))


def largest(graph: torch.fx.Graph) -> list[Any]:
    taken: set[torch.fx.Node] = set()
    found = []
    for site in find_sites(graph):
        if not taken.intersection(site.nodes):
            taken.update(site.nodes)
            found.append(site)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("choose", ["kernel", "compiler"])
def test_sites_in_a_chain(choose: str, dtype: torch.dtype) -> None:
    x, w = (t.to(dtype).requires_grad_() for t in INPUTS)
    found = opgraft.sites(layers, (x, w), choose=choose)
    assert [s.idiom for s in found if s.idiom].count("add-rms-norm") == 6
    assert all(s.chosen == (choose == "kernel") for s in found), [str(s) for s in found]
    wide = tuple(t.detach().double().requires_grad_() for t in (x, w))
    got, beside, exact = (
        checking.outputs_and_gradients(lambda *given, f=f: (f(*given),), given, True)
        for f, given in ((without_inductor(layers, choose), (x, w)), (layers, (x, w)), (layers, wide))
    )
    checking.check(got, beside, exact)


def test_sites_in_a_chain_under_inductor() -> None:
    compiled = torch.compile(layers, options=opgraft.compile_options(choose="kernel"))
    torch.testing.assert_close(compiled(*INPUTS), layers(*INPUTS))


def test_sites_in_a_chain_in_a_stretch() -> None:
    graph = captured(layers, *INPUTS).graph
    changes = [Change(site) for site in largest(graph) if site.idiom]
    found = stretch.around(changes[3].site, changes, scopes(graph))
    assert found is not None
    assert len(found.changes) == len(changes)
    given, chosen = (found.graph(chosen=c) for c in (False, True))
    assert len(chosen.graph.nodes) < len(given.graph.nodes)
    inputs = [torch.rand(fact.shape) for _, fact in found.inputs]
    torch.testing.assert_close(chosen(*inputs), given(*inputs))


def test_the_order_of_changes_does_not_matter() -> None:
    for turned in (False, True):
        module = captured(layers, *INPUTS)
        changes = [Change(site) for site in largest(module.graph) if site.idiom]
        make_all(changes[::-1] if turned else changes)
        module.graph.lint()
        module.recompile()
        torch.testing.assert_close(module(*INPUTS)[0], layers(*INPUTS))


@pytest.mark.parametrize("fault", ["raises", "reads what comes later"])
def test_a_site_that_cannot_be_rewritten_is_left_and_named(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rule finds it, its op has the right shape, and then writing goes wrong at one of the sites."""
    found = rules.matches

    def with_a_bad_one(graph: torch.fx.Graph) -> Any:
        pairs = found(graph)
        last = list(graph.nodes)[-2]

        def write(emit: Any, *args: Any) -> Any:
            if isinstance(args[0], torch.fx.Node):
                if fault == "raises":
                    raise KeyError("nothing here")
                args = (last,)
            return (emit(torch.ops.opgraft.gelu.default, *args),)

        bad = next(i for i, (rule, _) in enumerate(pairs) if rule.name == "tanh-gelu")
        pairs[bad] = (pairs[bad][0], dataclasses.replace(pairs[bad][1], write=write))
        return pairs

    monkeypatch.setattr(rules, "matches", with_a_bad_one)
    monkeypatch.setattr("opgraft.compile.measure.verify", lambda around: None)
    with one_warning("cannot be rewritten"):
        got = without_inductor(layers, "kernel")(*INPUTS)
    torch.testing.assert_close(got, layers(*INPUTS))


def test_a_rehearsal_changes_nothing() -> None:
    module = captured(layers, *INPUTS)
    before = str(module.graph)
    sound, failed = rehearsed(module.graph, [Change(site) for site in largest(module.graph) if site.idiom])
    assert str(module.graph) == before
    assert sound
    assert not failed


def test_a_cast_that_others_read_too_comes_along() -> None:
    """The op reads what the cast is of, so that a part of the graph around the site needs both."""

    def function(x: torch.Tensor, w: torch.Tensor) -> Any:
        wide = x.float()
        normal = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return w * normal.to(x.dtype), wide.cumsum(-1)

    x, w = (t.bfloat16() for t in INPUTS)
    graph = captured(function, x, w).graph
    (site,) = find_sites(graph)
    assert len(site.way_in) == 1
    alone = around(site, scopes(graph), lambda node: False)
    assert alone is not None
    inputs = [{16: w, 48: x}[fact.shape[0] * (fact.shape[1] if len(fact.shape) > 1 else 1)] for _, fact in alone.inputs]
    torch.testing.assert_close(alone.graph(kernel=True)(*inputs)[-1], function(x, w)[0])
    torch.testing.assert_close(without_inductor(function, "kernel")(x, w), function(x, w))
