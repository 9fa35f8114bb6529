"""What a run does with custom ops besides calling them: registrations that fail, backwards, exports, lookups in vain.

Imports nothing of torch: it works in a program that has not imported it yet.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from opgraft.diagnostics.conform.lab import site
from opgraft.diagnostics.conform.lab.tap import TORCH_NAMESPACES, Listener, wrap
from opgraft.diagnostics.model import Location

MOST_OF_A_KIND = 100


def _here() -> Location | None:
    """The caller's place in the reader's code; None where torch itself calls on its own account."""
    return site.walk(sys._getframe(2))[0]


def watch(torch: ModuleType, listener: Listener) -> None:
    """Notes in the listener's book what happens; changes nothing of it."""
    events = listener.book.events

    def note(what: str, where: Location | None, **more: Any) -> None:
        if listener.on and where is not None and sum(event["what"] == what for event in events) < MOST_OF_A_KIND:
            events.append({"what": what, "where": where, **more})

    def around_schema(original: Any) -> Any:
        def infer_schema(*args: Any, **kwargs: Any) -> Any:
            try:
                return original(*args, **kwargs)
            except Exception as error:
                note("bad-schema", _here(), text=f"{type(error).__name__}: {error}"[:2000])
                raise

        return infer_schema

    def around_define(original: Any) -> Any:
        def define(self: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                result = original(self, *args, **kwargs)
            except Exception as error:
                note("bad-schema", _here(), text=f"{type(error).__name__}: {error}"[:2000])
                raise
            note("defined", _here(), name=f"{self.ns}::{result}", library=id(self))
            return result

        return define

    def around_library(original: Any) -> Any:
        def made(self: Any, *args: Any, **kwargs: Any) -> None:
            try:
                original(self, *args, **kwargs)
            except Exception as error:
                note("namespace-taken", _here(), text=f"{type(error).__name__}: {error}"[:2000], ns=str(args[:1]))
                raise
            note("library", _here(), ns=getattr(self, "ns", ""))

        return made

    def around_dispatch(original: Any) -> Any:
        def _dispatch_library(kind: str, ns: str, key: str, path: str = "/dev/null", line: int = 0) -> Any:
            # torch names the caller of Library.__init__ as the place of the registration, and that is `made` here:
            # its own caller is meant.
            frame = sys._getframe(1).f_back if path == __file__ else None
            while frame is not None and path == __file__:
                frame = frame.f_back
                path, line = (frame.f_code.co_filename, frame.f_lineno) if frame is not None else ("/dev/null", 0)
            return original(kind, ns, key, path, line)

        return _dispatch_library

    def around_destroy(original: Any) -> Any:
        def _destroy(self: Any) -> None:
            if listener.on and _here() is not None:
                # The op is defined anew: what was met of the old one is checked while that is still there.
                listener.before_loss(frozenset(getattr(self, "_op_defs", ())))
            original(self)

        return _destroy

    def around_lookup(original: Any) -> Any:
        def lookup(self: Any, op_name: str) -> Any:
            try:
                return original(self, op_name)
            except AttributeError:
                if not op_name.startswith("__"):
                    where = _here()
                    name = f"{self.name}::{op_name}"
                    note("no-such-op", where or site.traced_location(), name=name)
                raise

        return lookup

    def around_backward(original: Any) -> Any:
        def _engine_run_backward(t_outputs: Any, *args: Any, **kwargs: Any) -> Any:
            where = _here()
            if where is not None:
                # (grad_tensors, retain_graph, create_graph, inputs, ...) in torch 2.11 to 2.15.
                second = bool(args[2]) if len(args) > 2 else False
                if second or not any(event["what"] == "backward" for event in events):
                    note("create_graph" if second else "backward", where)
            try:
                return original(t_outputs, *args, **kwargs)
            except RuntimeError as error:
                if "double backward" in str(error):
                    note("no-double-backward", where, text=str(error)[:2000])
                raise

        return _engine_run_backward

    def around_node(original: Any) -> Any:
        def call_function(self: Any, the_function: Any, *args: Any, **kwargs: Any) -> Any:
            if isinstance(the_function, torch._ops.OpOverload) and the_function.namespace not in TORCH_NAMESPACES:
                note("inserted", _here(), name=the_function._schema.name)
            return original(self, the_function, *args, **kwargs)

        return call_function

    def around_save(original: Any) -> Any:
        def save(*args: Any, **kwargs: Any) -> Any:
            note("exported", _here())
            return original(*args, **kwargs)

        return save

    def around_hook(original: Any) -> Any:
        def excepthook(kind: type[BaseException], error: BaseException, trace: Any) -> None:
            if not issubclass(kind, (SystemExit, KeyboardInterrupt)):
                listener.book.error = f"{kind.__name__}: {error}"[:20000]
            original(kind, error, trace)

        return excepthook

    wrap(sys, "excepthook", around_hook, listener)
    library = torch.library
    wrap(library, "infer_schema", around_schema, listener)
    wrap(library.Library, "define", around_define, listener)
    if wrap(torch._C, "_dispatch_library", around_dispatch, listener):
        wrap(library.Library, "__init__", around_library, listener)
    wrap(library.Library, "_destroy", around_destroy, listener)
    wrap(torch._ops._OpNamespace, "__getattr__", around_lookup, listener)
    wrap(torch.autograd, "_engine_run_backward", around_backward, listener)
    wrap(torch.fx.Graph, "call_function", around_node, listener)
    wrap(getattr(torch, "export", None), "save", around_save, listener)
