"""Places inside the compiler's own code at which something else may be run: between the calls that it makes.

What a call costs there is what it costs a step: its code and data are as cold as the step's other work leaves them.
Python's profiling hook, which tells of every call that returns, reaches these places without compiling anything again.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from opgraft.diagnostics.measure import _compat


class Places:
    """Runs ``visit`` at every ``every``-th place; ``seen`` counts them all. One thread's code alone is reached."""

    def __init__(self, visit: Callable[[], None], every: int = sys.maxsize) -> None:
        self.visit = visit
        self.every = every
        self.seen = 0

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        before = sys.getprofile()
        sys.setprofile(self._told)
        try:
            yield
        finally:
            sys.setprofile(before)

    def _told(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "c_return":
            caller: FrameType | None = frame
        elif event == "return":
            caller = frame.f_back
        else:
            return
        if caller is None or not _compat.is_generated_code(caller):
            return
        self.seen += 1
        if self.seen % self.every == 0:
            self.visit()
