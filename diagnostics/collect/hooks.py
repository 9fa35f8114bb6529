"""Puts the hooks in and takes them out. They are in once a process, however many watchers listen, and leave no trace.

What is touched: a handler on the trace logger (H1), ``exc.format_graph_break_message`` (H2), the callbacks around a
compile (H6), the logger object that ``convert_frame`` asks before it reports a skipped frame, the method that installs
a graph's global (for the clock, in the place of H16's profiler spans: it costs less and needs no profiler), Inductor's
partitions and its logger of CUDA graphs (H14), and ``Library.define``. Read and left alone: torch's counters (H4), and
for a late watcher its lists of breaks and of compiles (H3, H5).
A hook whose torch module is not imported yet is put in right after that module is (:mod:`arrival`).
"""

from __future__ import annotations

import functools
import logging
import sys
import threading
from collections.abc import Callable
from typing import Any, Protocol

from opgraft.diagnostics import _compat
from opgraft.diagnostics.collect import arrival, cudagraphs, graphs
from opgraft.diagnostics.collect.events import CudagraphsSkipped, Event, Message, Registered
from opgraft.diagnostics.collect.graphs import PREFIX, GraphClock
from opgraft.diagnostics.collect.messages import read_message
from opgraft.diagnostics.collect.place import changeable, own_prefixes, place
from opgraft.diagnostics.collect.trace import OWN_NAMESPACES


class Listener(Protocol):
    """What a watcher gives: every method must return quickly and may raise; the hooks swallow what it raises."""

    clock: GraphClock

    def trace(self, metadata: dict[str, Any], payload: Any) -> None: ...
    def message(self, message: Message) -> None: ...
    def event(self, event: Event) -> None: ...
    def window(self, opening: bool, source: str = "") -> None: ...


_listeners: list[Listener] = []
_undo: list[Callable[[], None]] = []
_missing: list[str] = []
_lock = threading.RLock()
_numbers = 0


def add(listener: Listener, late: bool = False) -> None:
    """Starts telling ``listener``; puts the hooks in if it is the first. ``late`` adds graphs that exist already."""
    with _lock:
        _listeners.append(listener)
        graphs.start(listener.clock, existing=late)
        if len(_listeners) == 1:
            _install()


def remove(listener: Listener) -> None:
    """Stops telling ``listener``; takes the hooks out if it was the last."""
    with _lock:
        if listener in _listeners:
            _listeners.remove(listener)
            graphs.stop(listener.clock)
        if not _listeners:
            while _undo:
                _undo.pop()()


def missing() -> tuple[str, ...]:
    """The hooks that this torch does not have, as words for the reader."""
    return tuple(dict.fromkeys(_missing))


def tell(call: Callable[[Listener], None]) -> None:
    """Calls ``call`` for every listener. An error of ours must never reach the compiler."""
    for listener in tuple(_listeners):
        _quietly(call, listener)


def _quietly(call: Callable[[Listener], None], listener: Listener) -> None:
    try:
        call(listener)
    except Exception as error:
        logging.getLogger(__name__).debug("a listener failed", exc_info=error)


class _TraceHandler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        metadata = getattr(record, "metadata", None)
        if not isinstance(metadata, dict) or "chromium_event" in metadata or "describe_tensor" in metadata:
            return
        payload = getattr(record, "payload", None)
        if "dynamo_start" in metadata:
            _listen_to_windows()
            tell(lambda listener: listener.window(True))
        elif "compilation_metrics" in metadata or "bwd_compilation_metrics" in metadata:
            tell(lambda listener: listener.window(False))
        tell(lambda listener: listener.trace(metadata, payload))


class _AlwaysAsks:
    """Stands for a logger that is asked for DEBUG before an event is traced; what it logs goes on as the user set
    it."""

    def __init__(self, logger: Any) -> None:
        self._logger = logger

    def isEnabledFor(self, level: int) -> bool:  # noqa: N802
        return True

    def debug(self, *args: Any, **kwargs: Any) -> None:
        if self._logger.isEnabledFor(logging.DEBUG):
            kwargs["stacklevel"] = kwargs.get("stacklevel", 1) + 1  # the line in torch, not this one
            self._logger.debug(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._logger, name)


def _install() -> None:
    _missing.clear()
    _install_trace()
    for name, install in (
        ("torch._dynamo.exc", _install_messages),
        ("torch._dynamo.convert_frame", _install_skips),
        ("torch._dynamo.output_graph", _install_clock),
        ("torch._dynamo.eval_frame", _install_entries),
        ("torch._dynamo.callback", _install_windows),
        ("torch._inductor.cudagraph_utils", _install_cudagraphs),
        ("torch._inductor.scheduler", _install_partitions),
        ("torch.library", _install_registrations),
    ):
        _undo.append(arrival.when_imported(name, install))


def _install_trace() -> None:
    logger = _compat.trace_logger()
    handler = _TraceHandler()
    table = _compat.intern_table()
    others = bool(table)
    logger.addHandler(handler)

    # logging.config.dictConfig disables every logger that it does not name; torch traces all the same.
    def make_handle(original: Callable[..., Any]) -> Callable[..., Any]:
        return lambda record: handler.emit(record) if logger.disabled else original(record)

    def make_enabled(original: Callable[..., Any]) -> Callable[..., Any]:
        return lambda level: logger.disabled or original(level)

    _replace(logger, "handle", make_handle, "")
    _replace(logger, "isEnabledFor", make_enabled, "")

    def undo() -> None:
        logger.removeHandler(handler)
        if not others and not logger.handlers:
            _compat.intern_table().clear()

    _undo.append(undo)


def _replace(holder: Any, name: str, make: Callable[[Any], Any], what: str) -> None:
    """Replaces ``holder.name`` by ``make(original)`` until the hooks go; notes ``what`` where there is no such name."""
    original = getattr(holder, name, None)
    if original is None:
        _missing.append(what)
        return
    replaced = make(original)
    own = name in vars(holder)
    setattr(holder, name, replaced)

    def undo() -> None:
        if vars(holder).get(name) is replaced:
            if own:
                setattr(holder, name, original)
            else:
                delattr(holder, name)

    _undo.append(undo)


def _install_messages(module: Any) -> None:
    def make(original: Callable[..., str]) -> Callable[..., str]:
        @functools.wraps(original)
        def format_graph_break_message(*args: Any, **kwargs: Any) -> str:
            try:
                _hear(dict(zip(("gb_type", "context", "explanation", "hints"), args, strict=False)) | kwargs)
            except Exception as error:
                logging.getLogger(__name__).debug("a message could not be read", exc_info=error)
            return original(*args, **kwargs)

        return format_graph_break_message

    _replace(module, "format_graph_break_message", make, "causes as text only: torch has no format_graph_break_message")


def _hear(fields: dict[str, Any]) -> None:
    global _numbers
    _numbers += 1
    message = read_message(
        _numbers,
        fields.get("gb_type", ""),
        fields.get("context", ""),
        fields.get("explanation", ""),
        fields.get("hints", ()),
        sys._getframe(2),
    )
    tell(lambda listener: listener.message(message))


def _install_skips(module: Any) -> None:
    _replace(module, "graph_break_log", _AlwaysAsks, "frames skipped whole are not seen: torch has no graph_break_log")


def _install_clock(module: Any) -> None:
    graph = getattr(module, "OutputGraph", None)

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def install_global_unsafe(self: Any, name: str, value: Any) -> Any:
            result = original(self, name, value)
            if name.startswith(PREFIX):
                graphs.wrap(self.global_scope, name, _compat.trace_id()[0])
            return result

        return install_global_unsafe

    _replace(graph, "install_global_unsafe", make, "no times of graphs: torch has no OutputGraph.install_global_unsafe")


def _install_entries(module: Any) -> None:
    words = "a step is the shortest repeat of graphs: entries are not seen"
    _replace(module, "_callback_from_stance", graphs.listen_to_entries, words)


def _start_window(args: Any) -> None:
    tell(lambda listener: listener.window(True, "callback"))


def _end_window(args: Any) -> None:
    tell(lambda listener: listener.window(False, "callback"))


def _listen_to_windows() -> bool:
    """Registers the callbacks of H6, again where ``torch._dynamo.reset`` has taken them away."""
    handler = _compat.callback_handler()
    if handler is None:
        return False
    if _start_window not in handler.start_callbacks:
        handler.register_start_callback(_start_window)
    if _end_window not in handler.end_callbacks:
        handler.register_end_callback(_end_window)
    return True


def _install_windows(module: Any) -> None:
    if not _listen_to_windows():
        _missing.append("the recording of CUDA graphs is not cut out of times: torch has no callback_handler")
        return

    def undo() -> None:
        handler = _compat.callback_handler()
        for callback, callbacks in ((_start_window, handler.start_callbacks), (_end_window, handler.end_callbacks)):
            if callback in callbacks:
                callbacks.remove(callback)

    _undo.append(undo)


def _tell_cudagraphs(event: CudagraphsSkipped) -> None:
    tell(lambda listener: listener.event(event))


def _install_cudagraphs(module: Any) -> None:
    def make(original: Any) -> Any:
        return cudagraphs.ListenedLogger(original, _tell_cudagraphs)

    _replace(module, "cudagraphs_log", make, "reasons of skipped CUDA graphs are not seen")


def _install_partitions(module: Any) -> None:
    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        return cudagraphs.listening_partition(original, _tell_cudagraphs)

    scheduler = getattr(module, "Scheduler", None)
    _replace(scheduler, "graph_partition", make, "what splits CUDA graphs is not seen")


def _install_registrations(module: Any) -> None:
    library = getattr(module, "Library", None)

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def define(self: Any, schema: str, *args: Any, **kwargs: Any) -> Any:
            result = original(self, schema, *args, **kwargs)
            namespace = str(getattr(self, "ns", ""))
            if namespace not in OWN_NAMESPACES:
                frame: Any = sys._getframe(1)
                while frame is not None and _is_registration(frame.f_code.co_filename):
                    frame = frame.f_back
                if frame is not None and changeable(frame.f_code.co_filename, own_prefixes()):
                    where = place(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
                    name = f"{namespace}::{str(schema).partition('(')[0].strip()}"
                    event = Registered(op=name, schema=str(schema)[:2000], location=where)
                    tell(lambda listener: listener.event(event))
            return result

        return define

    _replace(library, "define", make, "registrations are not seen: torch has no Library.define")


def _is_registration(path: str) -> bool:
    return path.endswith(("/torch/library.py", "/conform/lab/happenings.py")) or "/torch/_library/" in path
