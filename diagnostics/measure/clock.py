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


@dataclass(frozen=True)
class Sample:
    """Seconds a step, and of those what the host needed to issue it: all of them on a CPU."""

    seconds: float
    host_seconds: float


def sample(step: Callable[[], Any], steps: int, device: torch.device) -> float:
    """Seconds a step, over ``steps`` steps in a row."""
    return timed(step, steps, device).seconds


def timed(step: Callable[[], Any], steps: int, device: torch.device) -> Sample:
    """Times ``steps`` steps in a row, by events on a GPU, and by the host's clock what it took to issue them.

    On a GPU one step more goes ahead of them, from an idle device: what the host needs until the first kernel runs is
    hidden behind it, as it is between the steps of a program that does not wait after each.
    """
    if device.type != "cuda":
        begin = time.perf_counter_ns()
        for _ in range(steps):
            step()
        took = (time.perf_counter_ns() - begin) / steps * 1e-9
        return Sample(took, took)
    torch.cuda.synchronize(device)
    step()
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    first.record()
    begin = time.perf_counter_ns()
    for _ in range(steps):
        step()
    issued = (time.perf_counter_ns() - begin) / steps * 1e-9
    last.record()
    torch.cuda.synchronize(device)
    return Sample(float(first.elapsed_time(last)) / steps * 1e-3, issued)


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


def enqueue_seconds(call: Callable[[], Any], device: torch.device, calls: int = 50) -> float:
    """Host seconds a call, with no wait for the device inside: the median of five bursts from an idle device."""
    times = []
    for _ in range(5):
        synchronize(device)
        begin = time.perf_counter_ns()
        for _ in range(calls):
            call()
        times.append((time.perf_counter_ns() - begin) / calls * 1e-9)
    synchronize(device)
    return sorted(times)[2]
