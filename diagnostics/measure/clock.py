"""Time of a number of steps: CUDA events on a GPU, ``perf_counter_ns`` elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from opgraft.diagnostics.measure import _compat

# A sample has to be long against the resolution of the clock and the noise of one wake-up.
SAMPLE_SECONDS = {"cuda": 0.030, "cpu": 0.020}
# A stream that has to be held longer than this waits for something else than the host's launches.
LONGEST_HOLD_SECONDS = 0.25


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# How far the host was in issuing a sample's steps, and when: pairs of steps issued and seconds since the begin.
Issued = tuple[tuple[int, float], ...]
_MARKS = 16


@dataclass(frozen=True)
class Sample:
    """Seconds a step, and the host's way through the steps: on a CPU that is the same."""

    seconds: float
    issued: Issued


def sample(step: Callable[[], Any], steps: int, device: torch.device) -> float:
    """Seconds a step, over ``steps`` steps in a row."""
    return timed(step, steps, device).seconds


def timed(step: Callable[[], Any], steps: int, device: torch.device) -> Sample:
    """Times ``steps`` steps in a row, by events on a GPU, and by the host's clock how they were issued.

    On a GPU some steps more go ahead of them, from an idle device: what the host needs until the first kernel runs, and
    its own slow start, are hidden behind them, as between the steps of a program that does not wait after each.
    """
    if device.type != "cuda":
        begin = time.perf_counter_ns()
        for _ in range(steps):
            step()
        took = (time.perf_counter_ns() - begin) * 1e-9
        return Sample(took / steps, ((steps, took),))
    torch.cuda.synchronize(device)
    for _ in range(max(1, min(3, steps // 8))):
        step()
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    first.record()
    issued = []
    every = -(-steps // _MARKS)
    begin = time.perf_counter_ns()
    for number in range(1, steps + 1):
        step()
        if number % every == 0 or number == steps:
            issued.append((number, (time.perf_counter_ns() - begin) * 1e-9))
    last.record()
    torch.cuda.synchronize(device)
    return Sample(float(first.elapsed_time(last)) / steps * 1e-3, tuple(issued))


def paced(issued: Issued, device_seconds: float) -> float:
    """Seconds a step that steps in a row take, given how the host issued them and what the GPU needs for one.

    A step ends when the GPU is through with it: that much after the step before, and not before it was issued.
    """
    end, before = 0.0, 0
    for number, at in issued:
        end = max(end + (number - before) * device_seconds, at)
        before = number
    return end / before if before else 0.0


def queued(step: Callable[[], Any], steps: int, device: torch.device, host_seconds: float) -> float | None:
    """Seconds a step on the GPU alone: a spinning kernel holds the stream until the host has issued all ``steps``.

    Nothing then waits for the host, and no profiler is in the way. None where the stream cannot be held for as long:
    the step waits for the device itself, or it fills the device's queue.

    Args:
        host_seconds: what the host needs to issue a step.
    """
    hold = 2 * (steps + 1) * host_seconds + 0.5e-3
    for _ in range(4):
        torch.cuda.synchronize(device)
        if not _compat.hold_stream(hold, device):
            return None
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        step()
        first.record()
        for _ in range(steps):
            step()
        over = first.query()
        last.record()
        torch.cuda.synchronize(device)
        if not over:
            return float(first.elapsed_time(last)) / steps * 1e-3
        hold *= 3
        if hold > LONGEST_HOLD_SECONDS:
            break
    return None


def steps_for(seconds: float, device: torch.device, target: float | None = None) -> int:
    """How many steps a sample needs, given what one takes."""
    goal = target or SAMPLE_SECONDS.get(device.type, 0.020)
    return max(1, min(1000, round(goal / max(seconds, 1e-7))))


def settle(step: Callable[[], Any], device: torch.device, seconds: float, tolerance: float = 0.02) -> float:
    """Runs steps until two halves of the last ones agree or the time is used up; returns seconds a step.

    Warm-up ends when times are steady, not after a count: clocks, allocator and threads need what they need.
    """
    end = time.monotonic() + seconds
    last = sample(step, 1, device)
    steps = steps_for(last, device)
    while time.monotonic() < end:
        now = sample(step, steps, device)
        if abs(now - last) <= tolerance * now:
            return now
        last, steps = now, steps_for(now, device)
    return last


def enqueue_seconds(call: Callable[[], Any], device: torch.device, calls: int = 50, bursts: int = 5) -> float:
    """Host seconds a call, with no wait for the device inside: the median of some bursts from an idle device."""
    times = []
    for _ in range(bursts):
        synchronize(device)
        begin = time.perf_counter_ns()
        for _ in range(calls):
            call()
        times.append((time.perf_counter_ns() - begin) / calls * 1e-9)
    synchronize(device)
    return sorted(times)[bursts // 2]
