"""One compile of the op with Inductor, watched: what came out, which inputs were copied, and for what."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from opgraft.diagnostics.conform.lab.bench import Bench
from opgraft.diagnostics.conform.lab.case import Case
from opgraft.diagnostics.conform.lab.memory import fresh_call
from opgraft.diagnostics.conform.lab.tree import leaves, tensors


@dataclass(frozen=True)
class Compiled:
    """Results of a compiled call beside those of the same function in eager."""

    outputs: Any = None
    wanted: Any = None
    error: BaseException | None = None
    layout_copies: int = 0
    functional_bytes: int = 0
    graphs: int = 0


_kept: dict[tuple[str, str], Compiled] = {}


def compiled(bench: Bench, case: Case, backend: str, neighbours: bool = False) -> Compiled:
    """The call compiled with ``backend``, in the middle of two pointwise operations with ``neighbours``. Kept, since a
    compile is dear."""
    key = (bench.name, f"{backend}{neighbours}{bench.key(case)}")
    if key not in _kept:
        _kept[key] = _compile(bench, case, backend, neighbours)
    return _kept[key]


def _compile(bench: Bench, case: Case, backend: str, neighbours: bool) -> Compiled:
    op, kwargs = bench.op, case.kwargs
    written = set(bench.facts.written)
    names = [argument.name for argument in bench.facts.arguments]

    def call(*args: Any) -> Any:
        given = list(args)
        if neighbours:
            for index, value in enumerate(given):
                if isinstance(value, torch.Tensor) and value.dtype.is_floating_point and names[index] not in written:
                    given[index] = value * 1.0
        return op(*given, **kwargs), given if written else None

    torch._dynamo.reset()
    bench.tell(case, doing="compile")
    args, _ = fresh_call(case, requires_grad=False)
    straight, _ = fresh_call(case, requires_grad=False)
    with torch.no_grad():
        torch.manual_seed(0)
        wanted = call(*straight)
        try:
            with _watched() as seen:
                torch.manual_seed(0)
                outputs = torch.compile(call, backend=backend, dynamic=True)(*args)
        except Exception as error:
            return Compiled(wanted=[wanted, straight], error=error)
    return Compiled(
        outputs=[*leaves(outputs), *tensors(args)],
        wanted=[*leaves(wanted), *tensors(straight)],
        layout_copies=seen["copies"],
        functional_bytes=seen["bytes"],
    )


@contextlib.contextmanager
def _watched() -> Iterator[dict[str, int]]:
    """Counts the copies that Inductor makes for a layout rule or for functionalisation, while it compiles."""
    seen = {"copies": 0, "bytes": 0}
    with contextlib.ExitStack() as stack:
        try:
            from torch._dynamo.utils import ReinplaceCounters
            from torch._inductor import config, ir
            from torch._inductor.utils import fresh_cache
        except ImportError:
            yield seen
            return
        stack.enter_context(fresh_cache())
        settings: dict[str, Any] = {"force_disable_caches": True}
        if hasattr(config, "cpp_cache_precompile_headers"):
            settings["cpp_cache_precompile_headers"] = False  # 20 s for a cache that is thrown away
        stack.enter_context(config.patch(**settings))
        kernel: Any = ir.ExternKernel
        original = kernel.copy_input

        def copy_input(cls: Any, x: Any) -> Any:
            seen["copies"] += 1
            return original(x)

        before = ReinplaceCounters.get_total_missed_bytes()
        kernel.copy_input = classmethod(copy_input)
        try:
            yield seen
        finally:
            kernel.copy_input = original
            seen["bytes"] = ReinplaceCounters.get_total_missed_bytes() - before
