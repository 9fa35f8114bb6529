"""Times that mean something: warmed up, repeated, the median, and beside them a copy measured in the same process."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

Call = Callable[[], object]


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def host_us(call: Call, device: torch.device, *, batch: int = 20, batches: int = 101) -> float:
    """Microseconds of host time a call: what Python and the dispatcher take, which a GPU does not hide in small models.

    On a GPU the calls are queued without waiting. The batch is short: the queue never fills up, and a busy machine
    interrupts few of the batches, which the median then leaves out. On a CPU the kernel's own work is in the figure.
    """
    for _ in range(10 * batch):
        call()
    samples = []
    for _ in range(batches):
        synchronize(device)
        begin = time.perf_counter()
        for _ in range(batch):
            call()
        samples.append((time.perf_counter() - begin) / batch)
    synchronize(device)
    return statistics.median(samples) * 1e6


def elapsed_us(*calls: Call, device: torch.device, warm_up: int = 5, repeats: int = 25) -> list[float]:
    """Microseconds that the work of each call takes on the device: the median of ``repeats``, the calls taking turns.

    Taking turns lets a change of clocks or a busy neighbour hit all of them alike. GPU: CUDA events around each call.
    A buffer of twice the L2 is written before each: the inputs come from memory, and the events never wait for the
    host. CPU: the clock around each call.
    """
    for call in calls:
        for _ in range(warm_up):
            call()
    if device.type == "cpu":
        samples = [[_clock_us(call) for call in calls] for _ in range(repeats)]
        return [statistics.median(column) for column in zip(*samples, strict=True)]
    l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
    flush = torch.empty(max(2 * l2_bytes, 1 << 28), dtype=torch.int8, device=device)
    rounds = [[_event_pair(call, flush) for call in calls] for _ in range(repeats)]
    torch.cuda.synchronize(device)
    return [
        statistics.median(begun.elapsed_time(ended) * 1e3 for begun, ended in column)
        for column in zip(*rounds, strict=True)
    ]


def _clock_us(call: Call) -> float:
    begin = time.perf_counter()
    call()
    return (time.perf_counter() - begin) * 1e6


def _event_pair(call: Call, flush: torch.Tensor) -> tuple[torch.cuda.Event, torch.cuda.Event]:
    begun, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    flush.zero_()
    begun.record()
    call()
    ended.record()
    return begun, ended


def beside_copy_us(call: Call, x: torch.Tensor) -> tuple[float, float]:
    """Microseconds of ``call`` and of ``x.clone()``, in turns.

    The copy reads and writes as many bytes as GELU does, into memory as fresh as an op's output: what GELU could
    reach at best, on this machine, now. (On a CPU fresh memory costs page faults, which a copy into old memory hides.)
    """
    op, copy = elapsed_us(call, x.clone, device=x.device)
    return op, copy
