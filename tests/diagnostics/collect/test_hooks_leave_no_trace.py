"""The hooks leave no trace: loggers, handlers, wrapped functions, counters and config are as before, whatever
happened."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
from typing import Any

import pytest
import torch
import torch._dynamo.callback
import torch._dynamo.convert_frame
import torch._dynamo.exc
import torch._dynamo.output_graph
import torch._inductor.cudagraph_utils
import torch._inductor.scheduler

from opgraft import diagnostics as dx
from opgraft.diagnostics.collect.events import CompileBegan

pytestmark = pytest.mark.core
x = torch.randn(4)


def broken(x: torch.Tensor) -> torch.Tensor:
    x = x.sin()
    torch._dynamo.graph_break()
    return x.cos()


LINE = broken.__code__.co_firstlineno + 2


def state() -> dict[str, Any]:
    loggers = {
        name: (
            logger.level,
            tuple(map(id, logger.handlers)),
            logger.propagate,
            tuple(map(id, logger.filters)),
            logger.disabled,
        )
        for name, logger in logging.root.manager.loggerDict.items()
        if isinstance(logger, logging.Logger) and name.startswith("torch")
    }
    return {
        "loggers": loggers,
        "message": torch._dynamo.exc.format_graph_break_message,
        "skips": torch._dynamo.convert_frame.graph_break_log,
        "globals": torch._dynamo.output_graph.OutputGraph.install_global_unsafe,
        "define": torch.library.Library.define,
        "config": torch._dynamo.config.save_config(),
        "callbacks": (
            tuple(map(id, torch._dynamo.callback.callback_handler.start_callbacks)),
            tuple(map(id, torch._dynamo.callback.callback_handler.end_callbacks)),
        ),
        "handle": "handle" in vars(logging.getLogger("torch.__trace")),
        "cudagraphs": (
            torch._inductor.cudagraph_utils.cudagraphs_log,
            torch._inductor.scheduler.Scheduler.graph_partition,
        ),
        "path": tuple(map(id, sys.meta_path)),
        "threads": threading.active_count(),
    }


@pytest.fixture(autouse=True)
def warm() -> None:
    torch.compile(broken, backend="eager")(x)  # the first compile takes torch's own lazy handler away
    torch._dynamo.reset()


def test_after_a_watch() -> None:
    before = state()
    with dx.watch():
        torch.compile(broken, backend="eager")(x)
    assert state() == before


def test_after_an_exception() -> None:
    before = state()
    with contextlib.suppress(ZeroDivisionError), dx.watch():
        torch.compile(broken, backend="eager")(x)
        raise ZeroDivisionError
    assert state() == before


def test_when_two_watches_overlap() -> None:
    before = state()
    first, second = dx.watch(), dx.watch()
    first.__enter__()
    second.__enter__()
    torch.compile(broken, backend="eager")(x)
    first.__exit__(None, None, None)
    assert torch._dynamo.exc.format_graph_break_message is not before["message"]
    second.__exit__(None, None, None)
    assert state() == before
    assert len(first.report().findings) == len(second.report().findings) == 1


def test_graphs_are_given_back_as_they_were() -> None:
    step = torch.compile(broken, backend="eager")
    with dx.watch():
        step(x)
    graphs = {name: value for name, value in globals().items() if name.startswith("__compiled_fn")}
    assert graphs
    assert not any(value.__name__ == "compiled_graph" for value in graphs.values())


def test_an_already_compiled_model_is_seen_and_not_reset() -> None:
    step = torch.compile(broken, backend="eager")
    step(x)
    with dx.watch() as watched:
        for _ in range(5):
            step(x)
    report = watched.report()
    assert report.run is not None
    assert report.run.step_us is not None
    assert report.run.graphs == 2
    began = [event for event in watched.events() if isinstance(event, CompileBegan)]
    assert all(event.id.startswith("?") for event in began)  # nothing was compiled again


def test_the_users_own_log_settings_hold() -> None:
    torch._logging.set_logs(graph_breaks=True)
    torch.compile(broken, backend="eager")(x)
    torch._dynamo.reset()
    try:
        before = state()["loggers"]
        with dx.watch() as watched:
            torch.compile(broken, backend="eager")(x)
        assert state()["loggers"] == before
        assert len(watched.report().findings) == 1
    finally:
        torch._logging.set_logs()


def test_set_logs_during_a_watch_takes_nothing_away() -> None:
    with dx.watch() as watched:
        torch._logging.set_logs(graph_breaks=False)
        torch.compile(broken, backend="eager")(x)
    torch._logging.set_logs()
    assert len(watched.report().findings) == 1


def test_threads_and_several_models() -> None:
    def run() -> None:
        torch.compile(lambda x: broken(x) + 1, backend="eager")(x)

    with dx.watch() as watched:
        workers = [threading.Thread(target=run) for _ in range(3)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    (finding,) = watched.report().findings
    assert finding.counts.sites == 1


def test_a_missing_hook_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._dynamo.output_graph.OutputGraph, "install_global_unsafe")
    with dx.watch() as watched, contextlib.suppress(Exception):
        torch.compile(lambda x: x, backend="eager")(x)
    watched_names = watched.report().degraded
    assert any("times of graphs" in name for name in watched_names)


def test_values_are_those_of_a_run_without_us() -> None:
    step = torch.compile(broken, backend="eager")
    with dx.watch():
        torch.testing.assert_close(step(x), x.sin().cos())


def test_a_reset_in_the_watch_takes_no_hook_away() -> None:
    before = state()
    with dx.watch() as watched:
        torch._dynamo.reset()
        torch.compile(broken, backend="eager")(x)
        assert torch._dynamo.callback.callback_handler.start_callbacks
    assert state() == before
    assert len(watched.report().findings) == 1


def test_loggers_that_the_program_disables_are_heard_all_the_same() -> None:
    logger = logging.getLogger("torch.__trace")
    logger.disabled = True  # as logging.config.dictConfig does with every logger that it does not name
    try:
        with dx.watch() as watched:
            torch.compile(broken, backend="eager")(x)
    finally:
        logger.disabled = False
    assert len(watched.report().findings) == 1


@pytest.mark.parametrize(
    ("holder", "name", "words"),
    [
        ("torch._dynamo.exc", "format_graph_break_message", "causes as text only"),
        ("torch._dynamo.convert_frame", "graph_break_log", "frames skipped whole"),
        ("torch._dynamo.callback", "callback_handler", "recording of CUDA graphs"),
        ("torch._dynamo.utils", "get_compilation_metrics", "compiled before the watch"),
        ("torch._inductor.scheduler", "Scheduler", "splits CUDA graphs"),
    ],
)
def test_every_missing_hook_takes_one_part_away_by_name(
    monkeypatch: pytest.MonkeyPatch, holder: str, name: str, words: str
) -> None:
    watched = dx.watch()
    with monkeypatch.context() as patched:
        patched.delattr(sys.modules[holder], name)
        watched.__enter__()
    try:
        torch.compile(broken, backend="eager")(x)
    finally:
        watched.__exit__(None, None, None)
    report = watched.report()
    assert any(words in part for part in report.degraded)
    assert [(found.kind, found.location.line) for found in report.findings] == [("other-break", LINE)]
