"""``explain`` and ``watch`` in a live process."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any

from opgraft.diagnostics.collect.events import Event
from opgraft.diagnostics.collect.recorder import Recorder

if TYPE_CHECKING:
    from opgraft.diagnostics.model import Report

MOST_EVENTS = 200_000
"""A watcher keeps no more events than this; later ones are counted as dropped."""


class Watch:
    """A passive look at this process: ``with watch() as w: step()``, then ``w.report()``. It never resets anything."""

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._dropped = 0
        self._recorder: Recorder | None = None

    def __enter__(self) -> Watch:
        if self._recorder is not None:
            raise RuntimeError("this watch has been used; make a new one with watch()")
        self._recorder = Recorder(self._keep, late=True)
        self._recorder.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, stack: TracebackType | None
    ) -> None:
        if self._recorder is not None:
            how = "ok" if kind is None else "exception"
            self._recorder.stop(how=how, detail="" if error is None else f"{type(error).__name__}: {error}"[:500])

    def events(self) -> tuple[Event, ...]:
        """What was seen so far."""
        return tuple(self._events)

    def report(self) -> Report:
        """The findings so far; also inside the ``with`` block."""
        from opgraft.diagnostics.diagnose.report import diagnose

        events = list(self._events)
        if self._recorder is not None and (not events or events[-1].__class__.__name__ != "Ended"):
            events.append(self._recorder.laps())
        return diagnose(events)

    def _keep(self, event: Event) -> None:
        if len(self._events) < MOST_EVENTS:
            self._events.append(event)
        else:
            self._dropped += 1


def watch() -> Watch:
    """A context manager that watches every compile of this process and gives a report."""
    return Watch()


def explain(function: Callable[..., Any], **compile_options: Any) -> Callable[..., Report]:
    """Explains one call: ``explain(model)(*inputs)`` returns a report, as ``torch._dynamo.explain(model)(*inputs)``
    would.

    It runs ``torch._dynamo.explain`` under our hooks and, like it, resets the compiler before and after. A call that
    fails to compile gives a report too. ``compile_options`` are those of ``torch.compile`` that explain knows
    (``dynamic``)."""

    def call(*args: Any, **kwargs: Any) -> Report:
        import msgspec

        from opgraft.diagnostics.collect.own_figures import run_explain
        from opgraft.diagnostics.diagnose.explain_figures import why_it_differs

        watched = Watch()
        figures = None
        trouble: Exception | None = None
        with watched:
            try:
                figures = run_explain(function, compile_options, args, kwargs)
            except Exception as error:
                trouble = error
                watched._keep(_raised(error))
        report = watched.report()
        if figures is None and not report.findings and trouble is not None:
            raise trouble
        return msgspec.structs.replace(report, explain=why_it_differs(figures, report))

    return call


def _raised(error: Exception) -> Event:
    import traceback

    from opgraft.diagnostics.collect.events import Raised
    from opgraft.diagnostics.collect.place import from_summaries

    return Raised(
        type=f"{type(error).__module__}.{type(error).__qualname__}",
        text=str(error)[:8000],
        stack=from_summaries(traceback.extract_tb(error.__traceback__))[-60:],
        compiling=type(error).__module__.startswith("torch._dynamo"),
    )
