"""The last look at a choice: what no part of the model shows, the whole graph may."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import opgraft
from opgraft.compile import measure, stretch, timing
from opgraft.compile.change import Change
from opgraft.compile.choice import Chooser
from opgraft.compile.find import find_sites
from opgraft.compile.looks import Budget, Looks
from opgraft.compile.scope import scopes
from opgraft.compile.site import Decision, SiteReport
from opgraft.compile.store import Store

from models import captured, fake_times, gelu_amid, models

pytestmark = pytest.mark.own_second_look

_PART = 24  # more nodes than a stretch has here, even one that decides a dispute, and fewer than the whole graph
Seconds = Callable[[stretch.Stretch], float]


def one_site(x: torch.Tensor) -> torch.Tensor:
    return gelu_amid(40, x)


def two_kinds(x: torch.Tensor) -> torch.Tensor:
    """The second is another kind than the first, since it is wider."""
    half = one_site(x)
    return one_site(torch.cat([half, half], dim=-1))


@pytest.fixture(autouse=True)
def short_stretches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stretch, "MOST_NODES", 4)
    monkeypatch.setattr(stretch.around, "__defaults__", (4,))


def confirm(monkeypatch: pytest.MonkeyPatch, part: float, whole: Seconds) -> list[stretch.Stretch]:
    """In place of ``measure.confirm``: with its change a part takes ``part`` seconds and the whole graph ``whole``,
    without it one. Gives the looks at the whole graph."""
    seen: list[stretch.Stretch] = []

    def samples(found: stretch.Stretch, **options: Any) -> timing.Samples:
        after = part
        if len(found.nodes) > _PART:
            seen.append(found)
            after = whole(found)
        return timing.Samples(((1.0, after, after, 1.0),) * 11)

    monkeypatch.setattr(measure, "confirm", samples)
    return seen


def sites(function: Any, **options: Any) -> list[SiteReport]:
    return opgraft.sites(function, torch.randn(6, 16), **options)


@pytest.mark.parametrize(("whole", "choice"), [(0.9, "kernel"), (0.985, "compiler"), (1.1, "compiler")])
def test_a_kernel_that_lost_everywhere_else_serves_where_the_whole_graph_is_clearly_faster(
    whole: float, choice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timing, "interleave", fake_times(1.0, 1.1))
    looks = confirm(monkeypatch, 1.1, lambda found: whole)
    (site,) = sites(one_site)
    assert len(looks) == 1
    assert site.decision.choice == choice
    assert ("but the whole graph is faster with the kernel" in site.decision.why) == (choice == "kernel")


@pytest.mark.parametrize(("whole", "choice"), [(0.9, "kernel"), (1.0, "kernel"), (1.1, "compiler")])
def test_a_kernel_that_was_chosen_stays_where_the_whole_graph_is_not_slower(
    whole: float, choice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timing, "interleave", fake_times(2.0, 1.0))
    confirm(monkeypatch, 0.9, lambda found: whole)
    (site,) = sites(one_site)
    assert site.decision.choice == choice
    assert ("but the whole graph is slower with the kernel" in site.decision.why) == (choice == "compiler")


def test_a_clear_loss_in_the_surroundings_is_not_looked_at_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "interleave", fake_times(1.0, 2.0))
    assert confirm(monkeypatch, 1.1, lambda found: 0.5) == []
    assert not sites(one_site)[0].chosen


def test_a_kind_is_looked_at_beside_what_was_chosen_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two kinds that mend the same fault: with one of them changed the other gains nothing."""
    monkeypatch.setattr(timing, "interleave", fake_times(1.0, 1.1))
    looks = confirm(monkeypatch, 1.1, lambda found: 1.0 if found.kept else 0.5)
    found = sites(two_kinds)
    assert len({site.key for site in found}) == 2
    assert sorted(site.chosen for site in found) == [False, True]
    assert [(len(look.changes), len(look.kept)) for look in looks] == [(1, 0), (1, 1)]


def test_what_is_kept_stands_in_both_forms() -> None:
    graph = captured(lambda x: F.gelu(F.gelu(x.sin(), approximate="tanh") * 2, approximate="tanh"), torch.randn(4, 8))
    first, second = (Change(site) for site in find_sites(graph.graph))
    found = stretch.around(first.site, (), scopes(graph.graph), most=99)
    assert found is not None
    held = found.holding([second], [first])
    calls = [
        sum("opgraft.gelu" in str(n.target) for n in held.graph(chosen=chosen).graph.nodes) for chosen in (False, True)
    ]
    assert calls == [1, 2]
    assert held.signature() != found.holding([second], []).signature()


def test_a_short_graph_is_not_looked_at_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[int] = []

    def count(found: stretch.Stretch, **options: Any) -> timing.Samples:
        looks.append(len(found.nodes))
        return timing.Samples(((1.0, 0.5, 0.5, 1.0),) * 11)

    monkeypatch.setattr(timing, "interleave", fake_times(2.0, 1.0))
    monkeypatch.setattr(measure, "confirm", count)
    assert sites(models()["idiom"])[0].chosen
    assert len(looks) == 1


def test_a_look_that_would_take_more_than_half_of_the_time_left_is_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """A look at a part takes ten seconds by this clock, so that one at the whole graph would take a hundred or more."""
    ticks = iter(range(0, 10_000, 10))
    monkeypatch.setattr(timing, "interleave", fake_times(1.0, 1.1))
    monkeypatch.setattr("opgraft.compile.looks.time", SimpleNamespace(monotonic=lambda: next(ticks)))
    looks = confirm(monkeypatch, 1.1, lambda found: 0.5)
    (site,) = sites(one_site, tune_seconds=120.0)
    assert not site.chosen
    assert not looks
    assert "the whole graph is not looked at: it would take about" in site.decision.why
    (site,) = sites(one_site, tune_seconds=100_000.0)
    assert (site.chosen, len(looks)) == (False, 0), (
        "with nothing left to time here, nothing says how long it would take"
    )


def test_a_process_that_knows_every_site_makes_no_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes the decisions of the one that measured them, in no more time than a compile takes."""

    def fail(found: stretch.Stretch, **options: Any) -> timing.Samples:
        raise measure.UnmeasurableError("no time")

    monkeypatch.setattr(timing, "interleave", fake_times(2.0, 1.0))
    monkeypatch.setattr(measure, "confirm", fail)
    (first,) = sites(one_site)
    looks = confirm(monkeypatch, 0.5, lambda found: 0.5)
    (second,) = sites(one_site)
    assert not looks
    assert (first.chosen, second.chosen) == (False, False)
    assert "the process that measured its site had no time for it" in second.decision.why


def test_ranks_ask_the_same_whatever_time_they_have_left() -> None:
    """An obstacle is found where the decision is taken: a rank that measures nothing waits for that answer too."""
    module = captured(one_site, torch.randn(6, 16))
    asked: dict[float, list[str]] = {}

    for left in (0.0, 60.0):

        def ask(measured: Any, case: Any, key: str, about: Any, obstacle: Any = str, left: float = left) -> Decision:
            asked.setdefault(left, []).append(key)
            return Decision("compiler", "not measured: this rank has no time")

        chooser = Chooser("measured", Store(read_only=True), tune_seconds=60.0)
        scope_of = scopes(module.graph)
        lost = Decision("compiler", "a tie", measured=True, ratio=1.0)
        decided = [(case, lost) for case, _ in chooser.decide(module.graph)]
        Looks(Budget(60.0, left), ask).again(decided, scope_of)
    assert asked[0.0] == asked[60.0]
    assert len(asked[0.0]) == 2, "a stretch and the whole graph"


def test_an_unrolled_scan_is_changed_in_its_own_stretch() -> None:
    """Among its nodes are calls that do nothing, which no stretch copies."""
    from torch._higher_order_ops.associative_scan import associative_scan

    def function(decay: torch.Tensor, update: torch.Tensor) -> torch.Tensor:
        pairs = (decay * 0.5, update * 1)
        states = associative_scan(lambda a, b: (a[0] * b[0], a[1] * b[0] + b[1]), pairs, 0, combine_mode="generic")
        return states[1].cos()

    decay, update = torch.rand(16, 4), torch.randn(16, 4)
    module = captured(function, decay, update)
    (site,) = find_sites(module.graph)
    found = stretch.around(site, [Change(site)], scopes(module.graph), most=99)
    assert found is not None
    assert [change.site for change in found.changes] == [site]
    assert found.signature()["changes"]
    changed = found.graph(chosen=True)
    assert any("linear_scan" in str(node.target) for node in changed.graph.nodes)
    torch.testing.assert_close(changed(decay, update)[-1], function(decay, update))
