"""Helper processes that do not outlive the one that started them, however that one ends."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys

_PR_SET_PDEATHSIG = 1


def end_with(parent: int) -> None:
    """Ends this process as soon as the one that started it is gone. On Linux; elsewhere nothing is done.

    Args:
        parent: the process that started it, where it may have gone already; 0 where nobody knows.
    """
    if not sys.platform.startswith("linux"):
        return
    import ctypes

    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # It may have gone before the kernel was asked.
    if parent and os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def end_session(process: subprocess.Popen[bytes]) -> None:
    """Kills a process that leads a session of its own, with everything that it started, and waits for it."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
