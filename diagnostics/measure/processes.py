"""Fresh processes: each with caches of its own, a time limit, and an end that is reported whatever it was."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from opgraft.diagnostics.measure.request import Request
from opgraft.diagnostics.measure.worker import Refused
from opgraft.diagnostics.orphans import end_session

Answer = TypeVar("Answer")
Progress = Callable[[str, float], None]

_CACHES = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}


class RefusedError(LookupError):
    """A worker could not carry out its request: the sentence says why."""


@dataclass(frozen=True)
class Ended:
    """How a worker ended without an answer: ``how`` in words, and the last stage that it began."""

    how: str
    stage: str
    output: str


def ask(
    request: Request, kind: type[Answer], *, limit: float, progress: Progress | None = None, fresh: bool = True
) -> Answer | Ended:
    """Runs one worker and returns its answer, or how it ended.

    Args:
        limit: seconds after which the process and its children are killed.
        fresh: empty compile caches, thrown away afterwards; else the user's own.

    Raises:
        RefusedError: the request names something that is not there.
    """
    with _folder() as folder:
        files = [folder / name for name in ("request.json", "result.json", "progress.txt", "output.txt")]
        files[0].write_bytes(msgspec.json.encode(request))
        environment = dict(os.environ)
        environment["PYTHONUNBUFFERED"] = "1"
        if fresh:
            environment.update({name: str(folder / cache) for name, cache in _CACHES.items()})
        command = [sys.executable, "-m", "opgraft.diagnostics.measure.worker", *map(str, files[:3])]
        with files[3].open("wb") as output:
            process = subprocess.Popen(
                command,
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=environment,
                start_new_session=True,
            )
            how = _wait(process, files[2], limit, progress)
        if files[1].exists():
            content = files[1].read_bytes()
            with contextlib.suppress(msgspec.ValidationError):
                raise RefusedError(msgspec.json.decode(content, type=Refused).refused)
            return msgspec.json.decode(content, type=kind)
        return Ended(how, _last_stage(files[2]), _tail(files[3]))


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="opgraft-compare-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _wait(process: subprocess.Popen[bytes], stages: Path, limit: float, progress: Progress | None) -> str:
    """Waits for the end, passing on what the worker says; returns how it ended."""
    end = time.monotonic() + limit
    said = 0
    try:
        while process.poll() is None:
            if time.monotonic() > end:
                end_session(process)
                return f"did not end within {limit:.0f} s"
            said = _pass_on(stages, said, progress)
            time.sleep(0.1)
    except BaseException:
        end_session(process)
        raise
    code = process.returncode
    if code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"


def _pass_on(stages: Path, said: int, progress: Progress | None) -> int:
    if progress is None or not stages.exists():
        return said
    lines = stages.read_text().splitlines()
    for line in lines[said:]:
        share, _, message = line.partition(" ")
        with contextlib.suppress(ValueError):
            progress(message, float(share))
    return len(lines)


def _last_stage(stages: Path) -> str:
    lines = stages.read_text().splitlines() if stages.exists() else []
    return lines[-1].partition(" ")[2] if lines else "starting"


def _tail(output: Path, lines: int = 12) -> str:
    text = output.read_text(errors="replace") if output.exists() else ""
    return "\n".join(text.splitlines()[-lines:])
