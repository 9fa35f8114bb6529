"""Dynamic sizes: the range that a choice holds for, and another choice outside of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import opgraft
from opgraft.compile import measure
from opgraft.compile.choice import Chooser
from opgraft.compile.site import Decision
from opgraft.compile.store import Store

from models import Perceptron, models


@pytest.fixture
def by_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """From 16 rows on the kernel wins."""

    def measured(around: Any, **options: Any) -> Any:
        (rows,) = {fact.shape[0] for _, fact in around.inputs if fact.dynamic or len(fact.shape) > 1}
        return Decision("kernel" if rows > 16 else "compiler", "fixed", measured=True)

    monkeypatch.setattr(measure, "measure", measured)


class Compiled:
    """A model with its chooser, which says what stands in the graph of each compile."""

    def __init__(self, model: Any, **options: Any) -> None:
        self.chooser = Chooser("measured", Store())
        self.compiles = 0

        def backend(module: torch.fx.GraphModule, inputs: list[Any]) -> Any:
            self.compiles += 1
            self.chooser.apply(module.graph)
            module.recompile()
            return module.forward

        self.model, self.run = model, torch.compile(model, backend=backend, fullgraph=True, **options)

    def __call__(self, rows: int) -> str:
        x = torch.randn(rows, 16)
        with torch.no_grad():
            torch.testing.assert_close(self.run(x), self.model(x))
        return self.chooser.reports[-1].decision.choice


def test_outside_of_its_range_a_site_is_chosen_again(by_size: None) -> None:
    compiled = Compiled(Perceptron())
    assert compiled(5) == "compiler"  # a static size
    assert [compiled(rows) for rows in (9, 12, 16)] == ["compiler"] * 3
    assert compiled.compiles == 2
    assert [compiled(rows) for rows in (20, 32, 17)] == ["kernel"] * 3
    compiled(10)
    assert compiled.compiles == 3, "both ranges have their graph"


def test_the_graphs_of_a_frame_are_few(by_size: None) -> None:
    compiled = Compiled(Perceptron())
    for rows in (3, 5, 9, 17, 33, 65, 129, 257, 513, 1025, 40, 7):
        compiled(rows)
    assert compiled.compiles <= 5


def test_where_the_graph_is_as_it_was_every_size_is_served(by_size: None) -> None:
    """An idiom that stays the compiler's is the model as given."""
    compiled = Compiled(models()["idiom"])
    for rows in (3, 5, 9, 16, 2):
        assert compiled(rows) == "compiler"
    assert compiled.compiles == 2


@pytest.mark.parametrize("how", ["dynamic", "a range given", "no second compile"])
def test_who_asks_for_one_graph_gets_it(how: str, by_size: None) -> None:
    compiled = Compiled(Perceptron(), dynamic=True if how != "a range given" else None)
    x = torch.randn(20, 16)
    if how == "a range given":
        torch._dynamo.mark_dynamic(x, 0, min=2, max=600)
    with torch.no_grad():
        compiled.run(x)
        with torch.compiler.set_stance("fail_on_recompile"):
            compiled.run(torch.randn(300, 16))
    assert compiled.compiles == 1


def test_the_range_is_a_guard_of_a_whole_compile(by_size: None) -> None:
    model = Perceptron()
    options = opgraft.compile_options()
    compiled = torch.compile(model, options=options)
    reports = options["pre_grad_custom_pass"].chooser.reports
    for rows, choice in ((5, "compiler"), (9, "compiler"), (40, "kernel"), (12, "kernel")):
        x = torch.randn(rows, 16)
        with torch.no_grad():
            torch.testing.assert_close(compiled(x), model(x))
        assert reports[-1].decision.choice == choice
