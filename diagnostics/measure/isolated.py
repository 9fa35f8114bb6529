"""An op alone: kernel time with a cold cache, host time a call, and the copy bandwidth of the same process."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from opgraft.diagnostics.measure import clock, statistics
from opgraft.diagnostics.measure.breakdown import outermost
from opgraft.diagnostics.measure.calls import Call
from opgraft.diagnostics.measure.environment import last_level_cache_bytes
from opgraft.diagnostics.measure.profile import record
from opgraft.diagnostics.measure.subject import floating_in, tensors_in

_ROTATION_LIMIT = {"cuda": 4 << 30, "cpu": 512 << 20}
_MOST_COPIES = {"cuda": 512, "cpu": 64}


@dataclass(frozen=True)
class Alone:
    """One form of an op alone, a step's calls of it together.

    Attributes:
        us_per_step: kernel time on a GPU, wall time on a CPU, for all calls of one step.
        calls: calls a step.
        launches: kernels a step, where they could be counted.
        cold: whether the rotated inputs exceed the last-level cache.
    """

    us_per_step: float
    calls: int
    launches: float | None = None
    cold: bool = True

    @property
    def us_per_call(self) -> float:
        return self.us_per_step / max(1, self.calls)


def without_graphs(options: Mapping[str, Any] | None) -> dict[str, Any]:
    """The compile options without CUDA graphs: rotated inputs would be copied into a graph's fixed ones."""
    out = dict(options or {})
    mode = out.get("mode")
    if mode == "reduce-overhead":
        del out["mode"]
    elif mode == "max-autotune":
        out["mode"] = "max-autotune-no-cudagraphs"
    if isinstance(out.get("options"), Mapping):
        out["options"] = {k: v for k, v in out["options"].items() if k != "triton.cudagraphs"}
    return out


def once(function: Callable[..., Any], call: Call, train: bool) -> Callable[[], Any]:
    """One call of ``function``, with its backward where gradients are needed."""
    leaves = [t for t in floating_in((call.args, call.kwargs)) if t.requires_grad] if train else []
    if not leaves:

        def forward() -> Any:
            with torch.no_grad():
                return function(*call.args, **call.kwargs)

        return forward
    heads: list[torch.Tensor] = []

    def both() -> Any:
        output = function(*call.args, **call.kwargs)
        outputs = [t for t in floating_in(output) if t.requires_grad]
        if not heads:
            heads.extend(torch.randn_like(t) for t in outputs)
        return torch.autograd.grad(outputs, leaves, heads, allow_unused=True)

    return both


def rotated(call: Call, device: torch.device) -> tuple[list[Call], bool]:
    """Copies of a call that together exceed the last-level cache five times, as far as memory allows."""
    size = max(1, call.bytes)
    cache = last_level_cache_bytes(device)
    limit = _ROTATION_LIMIT.get(device.type, 512 << 20)
    if device.type == "cuda":
        limit = min(limit, torch.cuda.mem_get_info(device)[0] // 4)
    copies = max(2, min(-(-5 * cache // size), limit // size, _MOST_COPIES[device.type]))
    return [call.copy() for _ in range(copies)], copies * size > cache


def measure_alone(
    functions: Mapping[str, Callable[..., Any]],
    calls: Sequence[Call],
    device: torch.device,
    train: bool,
    seconds: float,
) -> dict[str, Alone]:
    """Times every function on the calls of one step. Functions take turns, so that drift hits them alike."""
    totals = dict.fromkeys(functions, 0.0)
    launches: dict[str, float | None] = dict.fromkeys(functions, 0.0 if device.type == "cuda" else None)
    cold = True
    number = sum(c.count for c in calls)
    for call in calls:
        copies, beyond = rotated(call, device)
        cold = cold and beyond
        runs = {name: [once(f, c, train) for c in copies] for name, f in functions.items()}
        for turns in runs.values():
            for turn in turns[:2]:
                turn()
        share = seconds / len(calls)
        if device.type == "cuda":
            for name, (us, kernels) in _kernel_times(runs, device).items():
                totals[name] += us * call.count
                known = launches[name]
                launches[name] = None if known is None else known + kernels * call.count
        else:
            for name, us in _wall_times(runs, device, share).items():
                totals[name] += us * call.count
        del copies, runs
    return {name: Alone(totals[name], number, launches[name], cold) for name in functions}


def _round(turns: Sequence[Callable[[], Any]]) -> Callable[[], None]:
    def go() -> None:
        for turn in turns:
            turn()

    return go


def _wall_times(
    runs: Mapping[str, Sequence[Callable[[], Any]]], device: torch.device, seconds: float
) -> dict[str, float]:
    end = time.monotonic() + seconds
    times: dict[str, list[float]] = {name: [] for name in runs}
    rounds = {
        name: clock.steps_for(clock.sample(_round(turns), 1, device), device, 0.005) for name, turns in runs.items()
    }
    while True:
        for name in (*runs, *reversed(list(runs))):
            turns = runs[name]
            times[name].append(clock.sample(_round(turns), rounds[name], device) / len(turns) * 1e6)
        if len(next(iter(times.values()))) >= 6 and (time.monotonic() >= end or len(next(iter(times.values()))) > 60):
            break
    # What interrupts a call on a shared processor only adds to it: the lower quartile is nearer to the op's own time.
    return {name: statistics.lower_quartile(found) for name, found in times.items()}


def _kernel_times(
    runs: Mapping[str, Sequence[Callable[[], Any]]], device: torch.device
) -> dict[str, tuple[float, float]]:
    """Kernel microseconds and kernels a call, from the profiler's records; the median over rounds."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    kernels: dict[str, float] = {}
    for _ in range(5):
        for name, turns in runs.items():
            taken = record(_round(turns), device)
            found = taken.device() or outermost(taken.host())
            times[name].append(sum(r.duration for r in found) / len(turns))
            kernels[name] = len(found) / len(turns)
    return {name: (statistics.median(found), kernels[name]) for name, found in times.items()}


def in_place_us(
    functions: Mapping[str, Callable[..., Any]], call: Call, device: torch.device, train: bool
) -> dict[str, float]:
    """Kernel microseconds of a step's calls on one set of inputs, over and over, from the profiler's records.

    That is what a kernel takes behind the one that wrote its input, as far as the caches hold it. On a CPU the kernels
    are operators and generated code, without what calls them.
    """
    runs = {name: [once(function, call, train)] * 8 for name, function in functions.items()}
    for turns in runs.values():
        turns[0]()
    return {name: us * call.count for name, (us, _) in _kernel_times(runs, device).items()}


def host_us(function: Callable[..., Any], call: Call, device: torch.device, train: bool) -> float:
    """Host microseconds a call. On a GPU the call only enqueues; on a CPU give a call whose kernel is negligible."""
    turn = once(function, call, train)
    for _ in range(3):
        turn()
    return clock.enqueue_seconds(turn, device) * 1e6


def copy_bandwidth(device: torch.device) -> float:
    """Bytes a second, read plus written, of a large copy: what a memory-bound kernel can hope for here."""
    size = max(64 << 20, min(4 * last_level_cache_bytes(device), 1 << 30)) if device.type == "cuda" else 64 << 20
    source = torch.empty(size, dtype=torch.uint8, device=device).fill_(1)
    sets = [torch.empty_like(source) for _ in range(3)]

    def go() -> None:
        for target in sets:
            target.copy_(source)

    go()
    best = min(clock.sample(go, 5, device) for _ in range(7))
    return len(sets) * 2 * size / best


def bytes_of(calls: Sequence[Call], outputs: Mapping[str, Any], cost: Mapping[str, Callable[..., Any] | None]) -> int:
    """Ideal bytes of one step's calls: what the op's record says, else inputs and outputs once each."""
    total = 0
    for call in calls:
        known = cost.get(call.op)
        if known is not None:
            total += int(known(*call.args, **call.kwargs).bytes) * call.count
        else:
            out = sum(t.numel() * t.element_size() for t in tensors_in(outputs.get(call.signature)))
            total += (call.bytes + out) * call.count
    return total
