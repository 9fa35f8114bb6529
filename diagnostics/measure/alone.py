"""The ops alone in one process: each, its compiled reference, and the raw form where there is one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from opgraft.diagnostics.measure import isolated
from opgraft.diagnostics.measure.arms import BASELINE, own_code
from opgraft.diagnostics.measure.calls import Call
from opgraft.diagnostics.measure.question import Question
from opgraft.diagnostics.measure.readings import AloneReading
from opgraft.diagnostics.measure.subject import Subject, tensors_in
from opgraft.diagnostics.measure.swap import Swap
from opgraft.registry import find, resolve


def time_alone(
    calls: Sequence[Call], subject: Subject, question: Question
) -> tuple[dict[str, dict[str, AloneReading]], dict[str, int]]:
    """Every op and swapped function alone: the op, its compiled reference, and the raw form where there is one."""
    device = subject.device
    options = isolated.without_graphs(question.compile_options)
    result: dict[str, dict[str, AloneReading]] = {}
    ideal: dict[str, int] = {}
    by_op: dict[str, list[Call]] = {}
    for call in calls:
        by_op.setdefault(call.op, []).append(call)
    for name, own in by_op.items():
        functions: dict[str, Callable[..., Any]] = {}
        swap = next((s for s in question.swapped if s.label == name), None)
        if swap is not None:
            functions["raw"] = swap.present
            reference: Callable[..., Any] = swap.function
        else:
            functions["op"] = resolve(name)
            reference = question.references[name]
            if len(question.ops) == 1 and len(question.raw) == 1 and accepts(question.raw[0], own[0], subject.train):
                functions["raw"] = question.raw[0].function
        functions[BASELINE] = torch.compile(named(reference), **options)
        readings = isolated.measure_alone(functions, own, device, subject.train, question.alone_seconds / len(by_op))
        small = small_call(name, own, device, subject.dtype)
        result[name] = {}
        for form, one in readings.items():
            host = None
            if small is not None and form != BASELINE:
                with contextlib.suppress(Exception):
                    host = isolated.host_us(functions[form], small, device, subject.train)
            result[name][form] = AloneReading(
                us_per_step=one.us_per_step,
                calls=one.calls,
                launches=one.launches,
                cold=one.cold,
                host_us_per_call=host,
            )
        spec = find(name)
        outputs = {c.signature: isolated.once(functions.get("op") or reference, c, False)() for c in own}
        ideal[name] = isolated.bytes_of(own, outputs, {name: spec.cost if spec else None})
    return result, ideal


def named(reference: Callable[..., Any]) -> Callable[..., Any]:
    def alone(*args: Any, **kwargs: Any) -> Any:
        return reference(*args, **kwargs)

    return own_code(alone, "reference_alone")  # type: ignore[arg-type]


def accepts(swap: Swap, call: Call, train: bool) -> bool:
    """Whether the raw form takes the op's own arguments: only then can it be timed alone on them."""
    try:
        isolated.once(swap.function, call, train)()
    except Exception:
        return False
    return True


def small_call(name: str, calls: Sequence[Call], device: torch.device, dtype: torch.dtype) -> Call | None:
    """A call whose kernel time is negligible: a small sample of the op's record on a CPU, any call on a GPU."""
    if device.type == "cuda":
        return min(calls, key=lambda c: c.bytes)
    spec = find(name)
    if spec is None or spec.samples is None:
        return None
    with contextlib.suppress(Exception):
        made = [Call(name, s.args, s.kwargs, s.name) for s in spec.samples(device, dtype)]
        filled = [c for c in made if c.bytes > 0 and all(t.numel() for t in tensors_in((c.args, c.kwargs)))]
        return min(filled, key=lambda c: c.bytes, default=None)
    return None
