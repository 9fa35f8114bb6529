"""Running something that may crash, hang, eat memory or end its process, and keeping what it said before.

The work runs in a fork: every registration of this process is alive there, and nothing that it does comes back but
the messages that it sends. The messages travel over a pipe, one line of JSON each.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import json
import os
import resource
import select
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from opgraft.diagnostics.orphans import end_with

Message = dict[str, Any]
Send = Callable[[Message], None]

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class Ending:
    """How the work ended: ``done``, ``signal``, ``exit``, ``silent`` (nothing said for too long) or ``timeout``."""

    how: str
    code: int = 0
    detail: str = ""

    @property
    def sentence(self) -> str:
        if self.how == "signal":
            name = signal.Signals(self.code).name if self.code in set(signal.Signals) else f"signal {self.code}"
            hint = {"SIGSEGV": ", a read or write of memory that is not its own", "SIGFPE": ", a division by zero"}
            return f"the process died of {name}{hint.get(name, '')}"
        if self.how == "exit" and self.detail:
            return self.detail
        if self.how == "exit":
            return f"the op ended the process with exit code {self.code}"
        return {"silent": "the op did not come back", "timeout": "the time was up"}.get(self.how, "")


def can_fork() -> bool:
    """False where CUDA is already in use in this process: a fork could not use it."""
    if not hasattr(os, "fork"):
        return False
    torch = sys.modules.get("torch")
    return torch is None or not torch.cuda.is_initialized()


def _quiet_process(memory_bytes: int | None, parent: int) -> None:
    """In the fork: default signals, no threads of the parent, no output of its own, a bound on memory."""
    end_with(parent)
    for name in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM):
        signal.signal(name, signal.SIG_DFL)
    signal.set_wakeup_fd(-1)
    with contextlib.suppress(Exception):
        faulthandler.disable()
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)
    with contextlib.suppress(ValueError, OSError):
        os.setsid()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if memory_bytes is not None:
        with open("/proc/self/statm", encoding="ascii") as statm:
            in_use = int(statm.read().split()[5]) * PAGE_BYTES
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_DATA, (in_use + memory_bytes, in_use + memory_bytes))
    warnings.simplefilter("ignore")
    sys.settrace(None)
    sys.setprofile(None)


def _fork(work: Callable[[Send], None], memory_bytes: int | None) -> tuple[int, int]:
    reader, writer = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    here = os.getpid()
    with warnings.catch_warnings():
        # Python 3.12 warns that a fork of a process with threads may deadlock; the time limit covers that.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child:
        os.close(writer)
        return child, reader
    code = 70
    try:
        os.close(reader)
        gc.disable()
        _quiet_process(memory_bytes, here)

        def send(message: Message) -> None:
            line = json.dumps(message).encode() + b"\n"
            while line:
                line = line[os.write(writer, line) :]

        try:
            work(send)
            send({"say": "end"})
            code = 0
        except SystemExit as leaving:
            code = leaving.code if isinstance(leaving.code, int) else 1
        except BaseException:
            send({"say": "broke", "text": traceback.format_exc(limit=-6)})
    finally:
        os._exit(code)


def run_isolated(
    work: Callable[[Send], None],
    receive: Callable[[Message], None],
    *,
    seconds: float,
    silence: Callable[[], float] | None = None,
    memory_bytes: int | None = None,
) -> Ending:
    """Runs ``work`` in a fork and hands its messages to ``receive`` as they come.

    Args:
        work: is called in the fork with a function that sends a message.
        receive: is called here with every message.
        seconds: the time for all of the work.
        silence: gives the longest time to wait for the next message.
        memory_bytes: how much private memory it may ask for beyond what this process holds.
    """
    child, reader = _fork(work, memory_bytes)
    ending = Ending("done")
    finished = False
    deadline = time.monotonic() + seconds
    try:
        for line in _lines(reader, deadline, silence):
            if isinstance(line, str):
                ending = Ending(line)
                break
            message = json.loads(line)
            if message.get("say") == "end":
                finished = True
            elif message.get("say") == "broke":
                ending = Ending("broke", detail=message["text"])
            else:
                receive(message)
    finally:
        os.close(reader)
        if ending.how in ("silent", "timeout") or not finished:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                if ending.how in ("silent", "timeout"):
                    os.killpg(child, signal.SIGKILL)
        status = _reap(child)
    if ending.how == "done" and not finished:
        if os.WIFSIGNALED(status):
            return Ending("signal", os.WTERMSIG(status))
        return Ending("exit", os.WEXITSTATUS(status))
    return ending


def _reap(child: int) -> int:
    for _ in range(200):
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return status
        time.sleep(0.01)
    with contextlib.suppress(ProcessLookupError):
        os.kill(child, signal.SIGKILL)
    return os.waitpid(child, 0)[1]


def _lines(reader: int, deadline: float, silence: Callable[[], float] | None) -> Iterator[bytes | str]:
    """Lines from the pipe; the string ``"timeout"`` or ``"silent"`` where the time ran out."""
    rest = b""
    while True:
        now = time.monotonic()
        wait = deadline - now
        if wait <= 0:
            yield "timeout"
            return
        patience = wait if silence is None else silence()
        ready, _, _ = select.select([reader], [], [], min(wait, patience))
        if not ready:
            yield "silent" if patience < wait else "timeout"
            return
        chunk = os.read(reader, 1 << 16)
        if not chunk:
            return
        rest += chunk
        *whole, rest = rest.split(b"\n")
        yield from whole
