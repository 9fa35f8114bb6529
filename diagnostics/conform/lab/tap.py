"""Taps the calls of custom ops in a running program: a thin callable in front of torch's own, taken away at the end.

Only ops outside torch's own namespaces are tapped. What the program computes, and what its compiler does, stays as it
was: the tap clones arguments before a call, outside of every mode, and lets errors pass.

Imports nothing of torch: it works in a program that has not imported it yet.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

from opgraft.diagnostics import _compat
from opgraft.diagnostics.conform.lab import met, site
from opgraft.diagnostics.conform.lab.met import Book, Met

# Namespaces of torch's own.
_NAMES = (
    "aten prims prim prims_libtorch inductor _inductor_test higher_order quantized "
    "quantized_decomposed _quantized c10d _c10d_functional _c10d_functional_autograd c10d_functional "
    "profiler rngprims streams debugprims mkldnn mkl onednn sparse static_runtime _caffe2 dist fbgemm "
    "xnnpack metal vulkan vulkan_prepack symm_mem cuda fsdp _test aoti_custom_ops export __torch__ "
    "mkldnn_prepacked prepacked flex_gemm cute_dsl dtensor device_mesh _dtensor _dynamo "
)
TORCH_NAMESPACES = frozenset(_NAMES.split())


class Tap:
    """Stands in front of the C++ function behind an op; equal to it in hash and attributes."""

    def __init__(self, listener: Listener, name: str, inner: Any) -> None:
        self.listener, self.name, self.inner = listener, name, inner

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.listener.call(self.name, self.inner, args, kwargs)

    def __hash__(self) -> int:
        return hash(self.inner)

    def __eq__(self, other: object) -> bool:
        return self is other or self.inner is other

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class Listener:
    """Writes into a book what the taps see."""

    def __init__(self, book: Book, journal: Callable[[str, Any], None]) -> None:
        self.book = book
        self.journal = journal
        self.local = threading.local()
        self.on = True
        self.undo: list[Callable[[], None]] = []
        self.counts: dict[str, int] = {}
        self.before_loss: Callable[[frozenset[str]], None] = lambda names: None

    # ---- calls

    def call(self, name: str, inner: Any, args: Any, kwargs: Any) -> Any:
        active = self.local.__dict__.setdefault("active", [])
        if not self.on or name in active or self.local.__dict__.get("busy"):
            return inner(*args, **kwargs)
        entry = None
        self.local.busy = True
        try:
            entry = _compat.without_frame_hook(self.note, name, args, kwargs)
        except Exception:
            entry = None
        finally:
            self.local.busy = False
        active.append(name)
        try:
            return inner(*args, **kwargs)
        except BaseException as error:
            if entry is not None and not entry.error:
                entry.error = f"{type(error).__name__}: {str(error)[:2000]}"
            raise
        finally:
            active.pop()
            if entry is not None and entry.count == 1 and entry.how != "traced":
                self.journal("done", None)

    def note(self, name: str, args: Any, kwargs: Any) -> Met | None:
        torch = sys.modules["torch"]
        if torch._C._functorch.peek_interpreter_stack() is not None:
            return None
        tensors = list(_tensors((args, kwargs)))
        data_less = any(met.is_data_less(tensor) for tensor in tensors)
        sharded = any(type(tensor).__name__ == "DTensor" for tensor in tensors)
        where, how = site.walk(sys._getframe(4))
        exporting = False
        if data_less or how == "traced":
            how = "traced"
            where = where or site.traced_location()
            exporting = bool(torch.compiler.is_exporting())
        device = tensors[0].device.type if tensors else "cpu"
        autocast = ""
        if device in ("cpu", "cuda") and torch.is_autocast_enabled(device):
            autocast = str(torch.get_autocast_dtype(device)).removeprefix("torch.")
        key = (name, how, where and (where.path, where.line), autocast, exporting, met.form((args, kwargs)))
        known = self.book.calls.get(key)
        if known is not None:
            known.count += 1
            return known
        kinds = self.counts.get(f"{name}|{how}", 0)
        if kinds >= met.MOST_CALLS_OF_AN_OP:
            return None
        self.counts[f"{name}|{how}"] = kinds + 1
        if device == "cuda" and torch.cuda.is_current_stream_capturing():
            return None
        sizes = tuple(index for index, value in enumerate(args) if isinstance(value, torch.SymInt))
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch._C._DisableTorchDispatch())
            stack.enter_context(torch._C.DisableTorchFunctionSubclass())
            kept_args, kept_kwargs = met.keep((args, kwargs), self.book)
        entry = Met(
            name=name,
            how=how,
            args=kept_args,
            kwargs=kept_kwargs,
            location=where,
            autocast=autocast,
            grad=bool(torch.is_grad_enabled()),
            exporting=exporting,
            sizes=sizes,
            sharded=sharded,
            subclass=next((kind for tensor in tensors if (kind := _own_class(tensor))), ""),
            order=len(self.book.calls),
        )
        self.book.calls[key] = entry
        if how != "traced":
            self.journal("call", entry)
        return entry

    # ---- taking hold of ops

    def tap(self, op: Any, name: str) -> None:
        inner = op.__dict__.get("_op")
        if inner is None or isinstance(inner, Tap):
            return
        op._op = Tap(self, name, inner)

        def back() -> None:
            if isinstance(op.__dict__.get("_op"), Tap):
                op._op = inner

        self.undo.append(back)

    def tap_overload(self, overload: Any) -> None:
        namespace = overload._schema.name.partition("::")[0]
        if namespace not in TORCH_NAMESPACES:
            base = overload._schema.name
            suffix = f".{overload._overloadname}" if overload._overloadname != "default" else ""
            self.tap(overload, base + suffix)

    def tap_packet(self, packet: Any) -> None:
        if packet._qualified_op_name.partition("::")[0] not in TORCH_NAMESPACES:
            self.tap(packet, packet._qualified_op_name)


def _tensors(value: Any) -> Any:
    torch = sys.modules["torch"]
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)


def _own_class(tensor: Any) -> str:
    """The name of a tensor's class where neither torch nor its compiler made it."""
    kind = type(tensor)
    return "" if kind.__module__.partition(".")[0] == "torch" else kind.__qualname__


def wrap(owner: Any, name: str, make: Callable[[Any], Any], listener: Listener) -> bool:
    """Replaces ``owner.name`` by ``make(original)`` until the listener is taken away; nothing, and False, where it is
    missing."""
    original = getattr(owner, name, None)
    if original is None:
        return False
    new = make(original)
    setattr(owner, name, new)

    def back() -> None:
        if getattr(owner, name, None) is new:
            setattr(owner, name, original)

    listener.undo.append(back)
    return True


def take_hold(torch: ModuleType, listener: Listener) -> None:
    """Taps every custom op that there is and that there will be."""
    ops = torch._ops

    def after(original: Any, then: Callable[[Any], None]) -> Any:
        def run(self: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(self, *args, **kwargs)
            if listener.on:
                then(self)
            return result

        run.__name__, run.__qualname__ = original.__name__, original.__qualname__
        return run

    wrap(ops.OpOverload, "__init__", lambda original: after(original, listener.tap_overload), listener)
    wrap(ops.OpOverloadPacket, "__init__", lambda original: after(original, listener.tap_packet), listener)
    # Later torch swaps the function behind an op of Python's for a faster one, after the op was made.
    wrap(ops.OpOverload, "_enable_pyobj_dispatch", lambda original: after(original, listener.tap_overload), listener)
    wrap(ops, "_refresh_packet", lambda original: after(original, listener.tap_packet), listener)
    for namespace in list(vars(torch.ops).values()):
        if isinstance(namespace, ops._OpNamespace):
            for packet in list(vars(namespace).values()):
                if isinstance(packet, ops.OpOverloadPacket):
                    listener.tap_packet(packet)
                    for overload in list(vars(packet).values()):
                        if isinstance(overload, ops.OpOverload):
                            listener.tap_overload(overload)


def hide_from_compiler(modules: tuple[ModuleType, ...]) -> None:
    """Tells Dynamo's frame hook to leave the functions of these modules alone."""
    _compat.leave_alone([code for module in modules for code in site.codes_of(module)])
