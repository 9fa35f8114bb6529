"""A watcher that attaches to a process whose models are compiled: what runs in the watch is diagnosed all the same,
from torch's own records, and what does not run is not."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from opgraft import diagnostics as dx
from opgraft.diagnostics.model import Report

pytestmark = pytest.mark.core
x = torch.randn(4, 4)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    torch._dynamo.utils.clear_compilation_metrics()
    yield
    torch._dynamo.reset()


def middle(x: torch.Tensor) -> torch.Tensor:
    x = x.sin()
    torch._dynamo.graph_break()
    return x.cos()


def first(x: torch.Tensor) -> torch.Tensor:
    torch._dynamo.graph_break()
    return x.cos()


def branches(x: torch.Tensor) -> torch.Tensor:
    if x.sum() > 0:
        return x.sin()
    return x.cos()


def read(x: torch.Tensor) -> torch.Tensor:
    return x * x.sum().item()


def looped(x: torch.Tensor) -> torch.Tensor:
    for _ in range(3):
        x = x.sin()
        torch._dynamo.graph_break()
    return x


class Looped(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return looped(x)


def steps(compiled: object, count: int = 8) -> Report:
    with dx.watch() as watched:
        for _ in range(count):
            compiled(x)  # type: ignore[operator]
    return watched.report()


@pytest.mark.parametrize(
    ("function", "kind", "line", "skipped"),
    [
        (middle, "other-break", 2, 0),
        (first, "other-break", 1, 0),
        (branches, "data-branch", 1, 0),
        (read, "host-read", 1, 0),
        (looped, "other-break", 3, 1),
    ],
)
def test_a_compiled_function_is_diagnosed(function: object, kind: str, line: int, skipped: int) -> None:
    compiled = torch.compile(function, backend="eager")  # type: ignore[call-overload]
    compiled(x)
    report = steps(compiled)
    first_line = function.__code__.co_firstlineno  # type: ignore[attr-defined]
    found = [(f.kind, f.location.line - first_line, f.counts.frames_skipped) for f in report.findings]
    assert found == [(kind, line, skipped)]
    assert any("before this watch began" in line for line in report.findings[0].evidence)


def test_its_executions_and_its_cost_are_measured() -> None:
    compiled = torch.compile(middle, backend="eager")
    compiled(x)
    (found,) = steps(compiled).findings
    assert found.counts.per_step == 1
    assert found.cost.how == "measured"


def test_a_frame_that_never_compiled_is_seen_below_a_module() -> None:
    compiled = torch.compile(Looped(), backend="eager")
    compiled(x)
    report = steps(compiled)
    assert [(f.kind, f.location.function) for f in report.findings] == [("other-break", "looped")]
    assert report.run is not None
    assert report.run.frames_skipped >= 1


def test_what_does_not_run_in_the_watch_is_not_told() -> None:
    for function in (branches, read, looped):
        torch.compile(function, backend="eager")(x)
    compiled = torch.compile(middle, backend="eager")
    compiled(x)
    assert [f.kind for f in steps(compiled).findings] == ["other-break"]
    assert steps(torch.compile(lambda x: x + 1, backend="eager"), 1).findings == ()


def test_a_compile_in_the_watch_is_counted_by_itself() -> None:
    compiled = torch.compile(middle, backend="eager", dynamic=False)
    compiled(x)
    with dx.watch() as watched:
        compiled(x[:2])
    (found,) = [f for f in watched.report().findings if f.kind == "other-break"]
    assert found.counts.compiles == 1


@pytest.mark.parametrize(
    ("function", "kind"), [(read, "host-read"), (branches, "data-branch"), (looped, "other-break")]
)
def test_kinds_are_right_where_only_the_words_are_left(
    monkeypatch: pytest.MonkeyPatch, function: object, kind: str
) -> None:
    watched = dx.watch()
    with monkeypatch.context() as patched:
        patched.delattr(torch._dynamo.exc, "format_graph_break_message")
        watched.__enter__()
    try:
        torch.compile(function, backend="eager")(x)  # type: ignore[call-overload]
    finally:
        watched.__exit__(None, None, None)
    assert [f.kind for f in watched.report().findings] == [kind]
