"""The true number of breaks of small functions whose breaks are counted by hand, beside what torch's explain prints."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from opgraft import diagnostics as dx

pytestmark = pytest.mark.core
x = torch.randn(4, 4)


def middle(x: torch.Tensor) -> torch.Tensor:
    x = x.sin()
    torch._dynamo.graph_break()
    return x.cos()


def first(x: torch.Tensor) -> torch.Tensor:
    torch._dynamo.graph_break()
    return x.cos()


def data_dependent(x: torch.Tensor) -> torch.Tensor:
    if x.sum() > 0:
        return x.sin()
    return x.cos()


def in_loop(x: torch.Tensor) -> torch.Tensor:
    for _ in range(3):
        x = x.sin()
        torch._dynamo.graph_break()
    return x


@contextlib.contextmanager
def managed() -> Iterator[None]:
    yield


class Managed:
    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        pass


def under_context(x: torch.Tensor) -> torch.Tensor:
    with Managed():
        x = x.sin()
        torch._dynamo.graph_break()
        x.cos_()
    return x


def in_try(x: torch.Tensor) -> torch.Tensor:
    try:
        x = x.sin()
        torch._dynamo.graph_break()
    finally:
        x.cos_()
    return x


def called(x: torch.Tensor) -> torch.Tensor:
    x = x.sin()
    torch._dynamo.graph_break()
    return x.cos()


def calls(x: torch.Tensor) -> torch.Tensor:
    return called(x.tan()) + 1


class Broken(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.sin()
        torch._dynamo.graph_break()
        return x.cos()


def backward_prints(x: torch.Tensor) -> torch.Tensor:
    return Printing.apply(x.sin()).cos()


class Printing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:
        print("backward")
        return grad * 2


def no_tensor_operation(x: torch.Tensor) -> torch.Tensor:
    return x


def methods(x: torch.Tensor) -> torch.Tensor:
    return x.sin().cos().tan().exp()


@dataclass(frozen=True)
class Row:
    """``events`` breaks are met while one call compiles, on ``sites`` source lines; ``skipped`` frames never
    compile."""

    name: str
    function: Callable[[torch.Tensor], torch.Tensor]
    events: int
    sites: int = 1
    skipped: int = 0
    kind: str = "other-break"
    grad: bool = False


ROWS = [
    Row("break in the middle", middle, 1),
    Row("break is the first statement", first, 1),
    Row("data-dependent if", data_dependent, 1, kind="data-branch"),
    Row("break in a loop", in_loop, 1, skipped=1),
    Row("break under a context manager", under_context, 1, skipped=1),
    Row("break in try", in_try, 1, skipped=1),
    Row("break in a called function", calls, 2),
    Row("three modules with one break each", nn.Sequential(Broken(), Broken(), Broken()), 2),
    Row("print in a backward", backward_prints, 1, kind="untraceable-autograd", grad=True),
    Row("no tensor operation", no_tensor_operation, 0, sites=0),
    Row("four methods and no break", methods, 0, sites=0),
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_true_counts(row: Row) -> None:
    with dx.watch() as watched:
        torch.compile(row.function, backend="eager")(x.clone().requires_grad_(row.grad))
    report = watched.report()
    assert [f.kind for f in report.findings] == [row.kind] * (row.sites > 0)
    assert sum(f.counts.compiles for f in report.findings) == row.events
    assert sum(f.counts.sites for f in report.findings) == row.sites
    assert sum(f.counts.frames_skipped for f in report.findings) == row.skipped


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_explains_own_figure_is_shown_with_the_reason(row: Row) -> None:
    report = dx.explain(row.function)(x.clone().requires_grad_(row.grad))
    own = torch._dynamo.explain(row.function)(x.clone().requires_grad_(row.grad))
    assert report.explain is not None
    assert (report.explain.graph_count, report.explain.graph_break_count) == (own.graph_count, own.graph_break_count)
    assert bool(report.explain.why_it_differs) == (own.graph_break_count != row.events or row.skipped > 0)


def test_a_comprehension_with_a_break_is_one_site() -> None:
    def comprehension(x: torch.Tensor) -> list[torch.Tensor]:
        return [middle(x + i) for i in range(2)]

    with dx.watch() as watched:
        torch.compile(comprehension, backend="eager")(x)
    (finding,) = watched.report().findings
    assert finding.counts.sites == 1
    assert finding.location.text.strip() == "torch._dynamo.graph_break()"


def test_root_cause_goes_before_the_wrapper() -> None:
    with dx.watch() as watched:
        torch.compile(in_loop, backend="eager")(x)
    (finding,) = watched.report().findings
    assert finding.causes[0].gb_type == "Call to `torch._dynamo.graph_break()`"
    assert len(finding.causes) > 1
    assert "loop" in finding.causes[-1].gb_type.lower()


def test_a_step_counts_executions() -> None:
    step = torch.compile(middle, backend="eager")
    with dx.watch() as watched:
        for _ in range(6):
            step(x)
    report = watched.report()
    assert report.findings[0].counts.per_step == 1
    assert report.run is not None
    assert report.run.step_us is not None
