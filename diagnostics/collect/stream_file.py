"""A sink that appends every event to a file at once, so that the stream survives whatever becomes of the process."""

from __future__ import annotations

import os
from pathlib import Path

from opgraft.diagnostics.collect.events import Event, encode

LONGEST = 1 << 30


class StreamFile:
    """Writes events as JSON lines. One ``write`` a line: forked processes may append to the same file."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._written = 0

    def __call__(self, event: Event) -> None:
        if self._written > LONGEST:
            return
        line = encode(event)
        self._written += len(line)
        os.write(self._file, line)
