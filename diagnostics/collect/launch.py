"""Runs the user's program in a child process that streams events, and says how it ended. Nothing of it is kept in
memory."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from opgraft.diagnostics.model import Run

_CHILD = Path(__file__).with_name("child.py")


@dataclass(frozen=True)
class Target:
    """What to run: ``kind`` is ``script``, ``module`` or ``function``."""

    kind: str
    name: str
    arguments: tuple[str, ...] = ()


def run_watched(target: Target, events: Path, recording: Path | None = None) -> Run:
    """Runs the program to its end, whatever that is. Signals that reach this process go on to the child."""
    command = [
        sys.executable,
        str(_CHILD),
        str(events),
        str(recording or ""),
        target.kind,
        target.name,
        *target.arguments,
    ]
    started = time.perf_counter()
    child = subprocess.Popen(command)
    with _forward_signals(child):
        code = child.wait()
    return _run(target, code, time.perf_counter() - started)


@contextmanager
def _forward_signals(child: subprocess.Popen[bytes]) -> Iterator[None]:
    """SIGTERM and SIGHUP go to the child. Ctrl-C on a terminal reaches it by itself, and must not end the report."""

    def forward(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and os.isatty(0):
            return
        if child.poll() is None:
            child.send_signal(number)

    numbers = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
    before = {number: signal.signal(number, forward) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _run(target: Target, code: int, seconds: float) -> Run:
    command = (*(("-m",) if target.kind == "module" else ()), target.name, *target.arguments)
    if code < 0:
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        return Run(
            command=command,
            ended="interrupt" if -code == signal.SIGINT else "signal",
            exit_code=128 - code,
            detail=name,
            seconds=seconds,
        )
    return Run(command=command, ended="ok" if code == 0 else "exit", exit_code=code, seconds=seconds)
