"""One compile of the op, watched: what came out, whether its kernel ran, which inputs were copied, and for what."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from opgraft.diagnostics import _compat
from opgraft.diagnostics.conform.lab import vary
from opgraft.diagnostics.conform.lab.bench import Bench
from opgraft.diagnostics.conform.lab.case import Case, called, given
from opgraft.diagnostics.conform.lab.gradients import no_engine, steady
from opgraft.diagnostics.conform.lab.memory import fresh_call, fresh_values
from opgraft.diagnostics.conform.lab.tree import leaves, tensors

CACHE_LOGGERS = ("torch._inductor.codecache", "torch._functorch._aot_autograd.autograd_cache")


@dataclass(frozen=True)
class Compiled:
    """Results of a compiled call beside those of the same function in eager.

    Attributes:
        results: how many of ``outputs`` are results of the op; the rest are arguments after the call.
        calls: how often the op was called when the compiled code ran again; None where that cannot be seen.
        bypasses: why torch passed its compile caches by.
    """

    outputs: list[Any] = field(default_factory=list)
    wanted: list[Any] = field(default_factory=list)
    results: int = 0
    error: BaseException | None = None
    layout_copies: int = 0
    functional_bytes: int = 0
    calls: int | None = None
    bypasses: tuple[str, ...] = ()


_kept: dict[tuple[str, str], Compiled] = {}


def compiled(bench: Bench, case: Case, backend: str, neighbours: bool = False) -> Compiled:
    """The call compiled with ``backend``, in the middle of two pointwise operations with ``neighbours``. Kept, since a
    compile is dear."""
    key = (bench.name, f"{backend}{neighbours}{bench.key(case)}")
    if key not in _kept:
        _kept[key] = _compile(bench, case, backend, neighbours)
    return _kept[key]


def model(bench: Bench, case: Case, neighbours: bool) -> Callable[..., Any]:
    """A function of the arguments (``case.given``) that calls the op, with a pointwise producer for each input."""
    op, written, names = bench.op, set(bench.facts.written), _names(bench, case)

    def call(*args: Any) -> Any:
        values = list(args)
        if neighbours:
            for index, value in enumerate(values):
                if isinstance(value, torch.Tensor) and value.dtype.is_floating_point and names[index] not in written:
                    values[index] = value * 1.0
        return called(op, case, values), values if written else None

    return call


def _names(bench: Bench, case: Case) -> list[str]:
    """What the arguments are called, in the order of ``case.given``."""
    return [argument.name for argument in bench.facts.in_order(len(case.args), case.kwargs)]


def _compile(bench: Bench, case: Case, backend: str, neighbours: bool) -> Compiled:
    call = model(bench, case, neighbours)
    torch._dynamo.reset()
    bench.tell(case, doing="compile")
    args, straight = fresh_values(case), fresh_values(case)
    with torch.no_grad():
        torch.manual_seed(0)
        wanted = call(*straight)
        try:
            with _watched(bench) as seen:
                torch.manual_seed(0)
                run = torch.compile(call, backend=backend, dynamic=True)
                outputs = run(*args)
                calls = _calls(bench, case, run)
        except Exception as error:
            return Compiled(wanted=[wanted, straight], error=error)
    return Compiled(
        outputs=[*leaves(outputs), *tensors(args)],
        wanted=[*leaves(wanted), *tensors(straight)],
        results=len(list(leaves(outputs[0]))),
        layout_copies=seen.copies,
        functional_bytes=seen.bytes,
        calls=calls,
        bypasses=tuple(dict.fromkeys(seen.bypasses)),
    )


class _Counter:
    """Stands in front of the function behind an overload and counts."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.count = inner, 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.count += 1
        return self.inner(*args, **kwargs)

    def __hash__(self) -> int:
        return hash(self.inner)

    def __eq__(self, other: object) -> bool:
        return self is other or self.inner is other

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def _calls(bench: Bench, case: Case, run: Callable[..., Any]) -> int | None:
    """How often compiled code calls the op, or the overload in its place; None where this torch cannot show it."""
    planned = _compat.planned_overload(bench.op)
    overloads = [bench.op] if planned is None else [bench.op, planned]
    inner = [vars(overload).get("_op") for overload in overloads]
    if None in inner:
        return None
    counters = [_Counter(function) for function in inner]
    args, kwargs = fresh_call(case, requires_grad=False)
    for overload, counter in zip(overloads, counters, strict=True):
        overload._op = counter
    try:
        bench.op(*args, **kwargs)
        if not counters[0].count:
            return None
        counters[0].count = 0
        run(*fresh_values(case))
    finally:
        for overload, function in zip(overloads, inner, strict=True):
            overload._op = function
    return sum(counter.count for counter in counters)


@dataclass(frozen=True)
class Pair:
    """What compiled code gives, and what eager gives; or the error."""

    found: list[Any] = field(default_factory=list)
    wanted: list[Any] = field(default_factory=list)
    error: BaseException | None = None


def compiled_gradients(bench: Bench, case: Case, backend: str) -> Pair | None:
    """Gradients through the compiled call and in eager; None where eager has none to compare with."""
    call = model(bench, case, True)

    def gradients(function: Callable[..., Any]) -> list[Any]:
        args = fresh_values(case, None)
        torch.manual_seed(0)
        outputs = [out for out in tensors(function(*args)[0]) if out.requires_grad]
        inputs = [tensor for tensor in tensors(args) if tensor.requires_grad]
        found = torch.autograd.grad(outputs, inputs, [steady(out) for out in outputs], allow_unused=True)
        return [torch.zeros_like(at) if grad is None else grad for grad, at in zip(found, inputs, strict=True)]

    bench.tell(case, doing="compile")
    with torch.enable_grad():
        try:
            wanted = gradients(call)
        except Exception:
            return None
        torch._dynamo.reset()
        try:
            with _watched(bench):
                return Pair(gradients(torch.compile(call, backend=backend, dynamic=True)), wanted)
        except Exception as error:
            return None if no_engine(error) else Pair(error=error)


def other_size(bench: Bench, case: Case, backend: str) -> tuple[Case, Pair] | None:
    """The compiled call at a size that it was not compiled for; None where the op takes no other one."""
    sizes = [size for size in vary.extents(case) if size > 1]
    larger = vary.resized(case, sizes[0], sizes[0] + 5) if sizes else None
    if larger is None or not bench.real(larger).ok:
        return None
    call = model(bench, case, True)
    bench.tell(larger, doing="compile")
    torch._dynamo.reset()
    with torch.no_grad(), _watched(bench):
        run = torch.compile(call, backend=backend, dynamic=True)
        try:
            run(*fresh_values(case))
            torch.manual_seed(0)
            found = run(*fresh_values(larger))
        except Exception as error:
            return larger, Pair(error=error)
        torch.manual_seed(0)
        return larger, Pair(list(leaves(found)), list(leaves(call(*fresh_values(larger)))))


def written_views(bench: Bench, case: Case) -> int:
    """Bytes that compiled code copies where the written arguments are parts of workspaces: slices, and for bytes parts
    of a float workspace seen as bytes, as kernels take their scratch memory."""
    names = _names(bench, case)
    values = given(case)
    places = [
        index
        for index, value in enumerate(values)
        if isinstance(value, torch.Tensor) and names[index] in bench.facts.written and value.numel()
    ]

    def call(*args: Any) -> Any:
        parts = list(args)
        for index in places:
            size, shape = values[index].numel(), values[index].shape
            whole = (
                args[index].view(torch.uint8) if args[index].dtype == torch.float32 and as_bytes[index] else args[index]
            )
            parts[index] = whole[:size].view(shape)
        outputs = called(bench.op, case, parts)
        return outputs, [args[index].sum() for index in places]

    as_bytes = {index: values[index].dtype == torch.uint8 for index in places}

    def workspaces() -> list[Any]:
        spaces = fresh_values(case)
        for index in places:
            part = spaces[index]
            flat = torch.zeros(2 * part.numel() + 8, dtype=part.dtype, device=part.device)
            flat[: part.numel()].copy_(part.flatten())
            spaces[index] = flat[: flat.numel() // 4 * 4].view(torch.float32) if as_bytes[index] else flat
        return spaces

    bench.tell(case, doing="compile")
    torch._dynamo.reset()
    with torch.no_grad():
        try:
            with _watched(bench) as seen:
                torch.compile(call, backend="inductor")(*workspaces())
        except Exception:
            return 0
    return seen.bytes


class _Seen(logging.Handler):
    """What is seen while the compiler works; also the handler that hears why a cache is passed by."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.copies, self.bytes = 0, 0
        self.bypasses: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if "ypass" in text:
            self.bypasses.append(" ".join(text.split())[:200])


@contextlib.contextmanager
def _listening(seen: _Seen) -> Iterator[None]:
    """Hears the loggers of the compile caches, and counts their bypasses where they say nothing."""
    from torch._dynamo.utils import counters

    def count() -> int:
        return sum(
            value for group in list(counters.values()) for key, value in group.items() if key.endswith("_cache_bypass")
        )

    loggers = [logging.getLogger(name) for name in CACHE_LOGGERS]
    levels = [logger.level for logger in loggers]
    before = count()
    for logger in loggers:
        logger.addHandler(seen)
        logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.removeHandler(seen)
            logger.setLevel(level)
        if count() > before and not seen.bypasses:
            seen.bypasses.append("torch gives no reason")


@contextlib.contextmanager
def _watched(bench: Bench) -> Iterator[_Seen]:
    """Counts the copies that Inductor makes for a layout rule or for functionalisation, while it compiles.

    But for ``thorough``, the C++ around the op is made without vector units: their headers are most of a compile, and
    it is the op that is examined."""
    seen = _Seen()
    with contextlib.ExitStack() as stack:
        try:
            from torch._dynamo.utils import ReinplaceCounters
            from torch._inductor import config, ir
            from torch._inductor.utils import fresh_cache
        except ImportError:
            yield seen
            return
        if bench.thorough:
            _compat.know_vector_units()
        elif hasattr(config.cpp, "vec_isa_ok"):
            stack.enter_context(config.patch({"cpp.vec_isa_ok": False}))
        stack.enter_context(fresh_cache())
        stack.enter_context(_listening(seen))
        if hasattr(config, "cpp_cache_precompile_headers"):
            # 20 s for a cache that is thrown away
            stack.enter_context(config.patch(cpp_cache_precompile_headers=False))
        kernel: Any = ir.ExternKernel
        original = kernel.copy_input

        def copy_input(cls: Any, x: Any) -> Any:
            seen.copies += 1
            return original(x)

        before = ReinplaceCounters.get_total_missed_bytes()
        kernel.copy_input = classmethod(copy_input)
        try:
            yield seen
        finally:
            kernel.copy_input = original
            seen.bytes = ReinplaceCounters.get_total_missed_bytes() - before
