"""The asking side of a process that examines ops: what it is asked, how long it may be silent, what became of it.

The process leads a session of its own and is killed with everything that it started: at the end of its time, and where
the caller is interrupted. What it had answered by then is kept.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from opgraft.diagnostics.orphans import end_session

# Seconds that starting Python, torch and the modules takes at most.
START_SECONDS = 120.0
# By how much an op may be over its time, which is a goal and not a bound.
OVER = 1.5

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Files:
    """What the two processes tell each other: the request, one line an answered op, one line an op that is begun."""

    request: Path
    answers: Path
    begun: Path
    output: Path

    @classmethod
    def within(cls, folder: Path) -> Files:
        return cls(folder / "request.json", folder / "answers.jsonl", folder / "begun.txt", folder / "output.txt")

    def said(self) -> str:
        """What the process printed."""
        return self.output.read_text(errors="replace") if self.output.exists() else ""


def run(files: Files, *, seconds: float, wrap: Sequence[str] = (), progress: Progress | None = None) -> str:
    """Runs the process to its end and returns what went wrong, ``""`` where nothing did.

    Args:
        seconds: for each op.
        wrap: a command to run it under.
        progress: is called with the op that is begun, its number from 0, and the number of all.
    """
    environment = dict(os.environ, PYTORCH_NVML_BASED_CUDA_CHECK="1", PYTHONUNBUFFERED="1")
    environment["PYTHONPATH"] = os.pathsep.join(path for path in (os.getcwd(), *sys.path) if path)
    command = [
        *wrap, sys.executable, "-m", "opgraft.diagnostics.conform.host",
        str(files.request), str(files.answers), str(files.begun),
    ]  # fmt: skip
    with files.output.open("wb") as output:
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            trouble = _wait(process, files, seconds * OVER, progress)
        except KeyboardInterrupt:
            trouble = "interrupted"
        finally:
            end_session(process)
    if trouble or not process.returncode:
        return trouble
    lines = files.said().strip().splitlines()
    return lines[-1] if lines else f"it ended with {process.returncode}"


def _wait(process: subprocess.Popen[bytes], files: Files, seconds: float, progress: Progress | None) -> str:
    said, end = 0, time.monotonic() + START_SECONDS + seconds
    while process.poll() is None:
        lines = files.begun.read_text().splitlines() if files.begun.exists() else []
        if len(lines) > said:
            said, end = len(lines), time.monotonic() + START_SECONDS + seconds
            place, total, name = lines[-1].split(" ", 2)
            if progress is not None:
                progress(name, int(place), int(total))
        if time.monotonic() > end:
            return "it did not come back in time"
        time.sleep(0.05)
    return ""
