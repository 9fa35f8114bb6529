"""What ran during a step: kernels on a GPU, operators and generated kernels on a CPU, compiled regions on either."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import time
import warnings
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from opgraft.diagnostics.measure.clock import synchronize

# Inductor numbers its graphs over a process: the number says nothing about the kernel.
_GRAPH_PREFIX = re.compile(r"^graph_\d+_")


@dataclass(frozen=True)
class Record:
    """One interval of the profile, in microseconds. ``kind`` is "kernel", "copy" (memcpy, memset) or "host"."""

    name: str
    kind: str
    start: float
    duration: float
    thread: int = 0

    @property
    def end(self) -> float:
        return self.start + self.duration


@dataclass(frozen=True)
class Profile:
    """Records of ``steps`` steps."""

    records: tuple[Record, ...]
    steps: int

    def device(self) -> list[Record]:
        return sorted((r for r in self.records if r.kind != "host"), key=lambda r: r.start)

    def host(self) -> list[Record]:
        return [r for r in self.records if r.kind == "host"]

    def count(self, name: str) -> float:
        """How often a step runs the operator called ``name``."""
        return sum(r.name == name for r in self.records) / self.steps

    def regions(self, compile_ids: Collection[str]) -> float:
        """Graphs run a step: compiled regions entered, those of frames without a graph left out."""
        names = {f"Torch-Compiled Region: {one}" for one in compile_ids}
        return sum(r.name in names for r in self.host()) / self.steps


def record(step: Callable[[], Any], device: torch.device, steps: int = 1) -> Profile:
    """Profiles ``steps`` steps. The step has to be warm."""
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    synchronize(device)
    with _quiet(), profile(activities=activities) as taken:
        for _ in range(steps):
            step()
        synchronize(device)
    return Profile(tuple(without_overlap(_records(taken))), steps)


def record_turns(
    steps: Mapping[str, Callable[[], Any]],
    counts: Mapping[str, int],
    device: torch.device,
    rounds: int,
    load: float = 0.3,
) -> dict[str, list[Profile]]:
    """Profiles several steps in turns (ABBA) under one load: clocks and caches are then those of interleaved timing.

    Args:
        counts: steps in a turn, by name.
        load: seconds of the same turns before the first that counts, with the profiler on already.
    """
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    order = [*steps, *reversed(list(steps))]
    synchronize(device)
    with _quiet(), profile(activities=activities) as taken:
        end = time.monotonic() + load
        while time.monotonic() < end:
            for name in order:
                _turn(steps[name], counts[name], device)
        for _ in range(rounds):
            for name in order:
                with torch.profiler.record_function(_TURN + name):
                    _turn(steps[name], counts[name], device)
    records = without_overlap(_records(taken))
    turns = [r for r in records if r.kind == "host" and r.name.startswith(_TURN)]
    starts = [r.start for r in records]
    found: dict[str, list[Profile]] = {name: [] for name in steps}
    for turn in turns:
        inside = records[bisect_left(starts, turn.start) : bisect_right(starts, turn.end)]
        name = turn.name.removeprefix(_TURN)
        own = tuple(r for r in inside if not r.name.startswith(_TURN))
        found[name].append(Profile(own, counts[name]))
    return found


_TURN = "opgraft turn: "


def _turn(step: Callable[[], Any], count: int, device: torch.device) -> None:
    for _ in range(count):
        step()
    synchronize(device)


def _records(taken: Any) -> Iterator[Record]:
    for event in taken.profiler.kineto_results.events():
        on_device = event.device_type().name == "CUDA"
        name = event.name()
        if on_device and _is_annotation(event, name):
            continue
        kind = "host"
        if on_device:
            kind = "copy" if name.startswith(("Memcpy", "Memset")) else "kernel"
        yield Record(
            _GRAPH_PREFIX.sub("", name),
            kind,
            event.start_ns() / 1e3,
            event.duration_ns() / 1e3,
            event.start_thread_id(),
        )


def without_overlap(records: Iterable[Record]) -> list[Record]:
    """The records by their start, those of a device cut so that no two overlap: what began first keeps the time.

    A kernel that was launched to overlap the one before it (programmatic dependent launch) waits for it in its first
    lines, and the profiler counts the wait as if it ran: two such kernels in a row would take their time twice.
    """
    found, end = [], float("-inf")
    for record in sorted(records, key=lambda r: r.start):
        if record.kind != "host":
            start, end = max(record.start, end), max(record.end, end)
            record = replace(record, start=start, duration=end - start)
        found.append(record)
    return sorted(found, key=lambda r: r.start)


def _is_annotation(event: Any, name: str) -> bool:
    """Spans that kineto draws over a stream (compiled regions, user ranges) are no kernels."""
    kind = event.activity_type() if hasattr(event, "activity_type") else ""
    if kind:
        return "annotation" in str(kind).lower() or str(kind).lower() in ("cuda_sync", "overhead")
    if hasattr(event, "is_user_annotation") and event.is_user_annotation():
        return True
    return name.startswith(
        ("Torch-Compiled Region", "ProfilerStep", "## Call", "Context Sync", "Stream Sync", "Event Sync")
    )


def busy_us(records: list[Record]) -> float:
    """Time in which at least one record runs."""
    total, end = 0.0, float("-inf")
    for r in sorted(records, key=lambda r: r.start):
        total += max(0.0, r.end - max(end, r.start))
        end = max(end, r.end)
    return total


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Some builds of kineto print lines of their own to the process's error stream: they go nowhere meanwhile.

    That records of one cycle do not reach the next is meant: torch warns of it.
    """
    sys.stderr.flush()
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", message=".*Profiler clears events.*")
        try:
            kept = os.dup(2)
            null = os.open(os.devnull, os.O_WRONLY)
        except OSError:
            yield
            return
        stack.callback(os.close, kept)
        stack.callback(os.close, null)
        os.dup2(null, 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(kept, 2)
