"""One watcher of a process: listens to the hooks, stamps events and hands them to a sink."""

from __future__ import annotations

import logging
import os
import platform
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec

from opgraft.diagnostics import _compat
from opgraft.diagnostics.collect import hooks
from opgraft.diagnostics.collect.before import MISSING, compiled_before
from opgraft.diagnostics.collect.callee_times import CalleeTimes
from opgraft.diagnostics.collect.events import Began, Broke, CompileBegan, CompileEnded, Ended, Event, Message
from opgraft.diagnostics.collect.graphs import GraphClock
from opgraft.diagnostics.collect.laps import Window, summarise
from opgraft.diagnostics.collect.place import own_prefixes
from opgraft.diagnostics.collect.trace import TraceReader

Sink = Callable[[Event], None]
_COUNTED = ("frames", "stats", "graph_break", "inductor", "aot_autograd")


class Recorder:
    """Listens from :meth:`start` to :meth:`stop`. What reaches the sink is a whole stream: head, events, laps, end."""

    def __init__(self, sink: Sink, command: tuple[str, ...] = (), late: bool = False, sample: bool = False) -> None:
        self.clock = GraphClock()
        self.clock.callees = CalleeTimes() if sample else None
        self._sink = sink
        self._command = command
        self._late = late
        self._reader = TraceReader(self.event)
        self._lock = threading.Lock()
        self._process = os.getpid()
        self._began = 0.0
        self._before: dict[str, int] = {}
        self._opened: dict[int | str, list[int]] = {}
        self._windows: deque[Window] = deque(maxlen=4096)
        self._compiled = False
        self._missing: tuple[str, ...] = ()
        self._head_written = False

    def start(self) -> None:
        """Puts the hooks in. The head of the stream is written with the first event, when torch is there to be
        named."""
        self._began = time.perf_counter()
        self._before = _flat_counters()
        hooks.add(self, late=self._late)
        if self._late and "torch._dynamo" in sys.modules:
            self._missing = () if _compat.keeps_compiles() else (MISSING,)
            self._tell_before()

    def stop(self, exit_code: int = 0, how: str = "ok", detail: str = "") -> None:
        """Takes the hooks out and writes the laps and the end."""
        hooks.remove(self)
        if os.getpid() != self._process:
            return
        self.event(self.laps())
        after = _flat_counters()
        self.event(
            Ended(
                exit_code=exit_code,
                seconds=time.perf_counter() - self._began,
                how=how,
                detail=detail[:2000],
                counters={
                    name: count - self._before.get(name, 0)
                    for name, count in after.items()
                    if count != self._before.get(name, 0)
                },
                compiled_anything=self._compiled,
                device=_device(sys.modules.get("torch")),
            )
        )

    def _tell_before(self) -> None:
        """What was compiled before this watch began; an error in torch's records must not end the program."""
        try:
            for event in list(compiled_before()):
                self._put(event)
        except Exception as error:
            logging.getLogger(__name__).debug("torch's records could not be read", exc_info=error)

    def laps(self) -> Event:
        """The repeating step as seen up to now."""
        samples = self.clock.callees.samples if self.clock.callees is not None else {}
        laps = summarise(list(self.clock.calls), list(self._windows))
        return msgspec.structs.replace(
            laps,
            entered=tuple(sorted(self.clock.entered or ())),
            callee_us={gap: {name: tuple(us) for name, us in names.items()} for gap, names in samples.items()},
        )

    def event(self, event: Event) -> None:
        """Stamps and passes on one event."""
        if isinstance(event, (CompileBegan, CompileEnded)):
            self._compiled = True
        elif isinstance(event, Broke) and self.clock.callees is not None:
            self.clock.callees.broken.add(event.id)
        self._put(event)

    def _put(self, event: Event) -> None:
        with self._lock:
            if not self._head_written:
                self._head_written = True
                self._sink(self._stamp(self._head()))
            self._sink(self._stamp(event))

    def trace(self, metadata: dict[str, Any], payload: Any) -> None:
        self._reader.read(metadata, payload)

    def message(self, message: Message) -> None:
        self._reader.message(message)

    def window(self, opening: bool, source: str = "") -> None:
        """A compile begins or ends in this thread, or in one of those that ``source`` speaks for; what runs meanwhile
        is not a gap of the step."""
        open_ = self._opened.setdefault(source or threading.get_ident(), [])
        if opening:
            open_.append(time.perf_counter_ns())
        elif open_:
            self._windows.append((open_.pop(), time.perf_counter_ns()))
        else:
            now = time.perf_counter_ns()
            self._windows.append((now, now))

    def _stamp(self, event: Event) -> Event:
        here = os.getpid()
        return msgspec.structs.replace(
            event,
            t=time.perf_counter() - self._began,
            thread=0 if threading.current_thread() is threading.main_thread() else threading.get_ident(),
            process=0 if here == self._process else here,
        )

    def _head(self) -> Began:
        torch = sys.modules.get("torch")
        return Began(
            opgraft=package_version(),
            torch=str(getattr(torch, "__version__", "")),
            python=platform.python_version(),
            device=_device(torch),
            command=self._command,
            missing=(*hooks.missing(), *self._missing),
            prefixes=own_prefixes(),
            late=self._late,
        )


def package_version() -> str:
    """The version of the installed opgraft, without importing it."""
    import importlib.metadata

    try:
        return importlib.metadata.version("opgraft")
    except importlib.metadata.PackageNotFoundError:
        return "0"


def _device(torch: Any) -> str:
    """Where the run computes: the name of the GPU where CUDA is in use already, else ``cpu``. Never starts CUDA."""
    try:
        if torch.cuda.is_initialized():
            return str(torch.cuda.get_device_name())
    except Exception:
        return "cpu"
    return "cpu"


def _flat_counters() -> dict[str, int]:
    found: dict[str, int] = {}
    for group, values in _compat.counters().items():
        if group in ("graph_break", "unimplemented"):
            found[group] = sum(values.values())
        elif group in _COUNTED:
            found.update({f"{group}.{name}": count for name, count in values.items() if isinstance(count, int)})
    return found
