"""Records the event streams of programs: ``python record.py OPGRAFT FOLDER PROGRAM...``.

OPGRAFT is the command of the environment whose torch is meant. Paths of this machine are replaced in what is written,
so that a stream reads the same wherever it was recorded."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

_PATHS = (
    (re.compile(r"/[^\s\"'`]*?/site-packages"), "/env/site-packages"),
    (re.compile(r"/[^\s\"'`]*?/lib/python3\.\d+"), "/python/lib"),
    (re.compile(r"/[^\s\"'`]*?/tests/diagnostics/programs"), "/programs"),
    (re.compile(r"/[^\s\"'`]*?/diagnostics(?=[\"/])"), "/env/site-packages/opgraft/diagnostics"),
)


def record(opgraft: str, folder: Path, program: Path) -> None:
    """Runs one program and writes ``PROGRAM-TORCH.jsonl``."""
    with tempfile.TemporaryDirectory() as scratch:
        events = Path(scratch) / "events.jsonl"
        command = [opgraft, "explain", "--no-check-ops", "-q", "--events", str(events), str(program.resolve())]
        subprocess.run(command, check=False, timeout=600, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        lines = events.read_text().splitlines()
    torch = json.loads(lines[0])["torch"].partition("+")[0]
    (folder / f"{program.stem}-{torch}.jsonl").write_text("\n".join(map(anonymous, lines)) + "\n")


def anonymous(line: str) -> str:
    """The line without paths of this machine."""
    for pattern, replacement in _PATHS:
        line = pattern.sub(replacement, line)
    return line


if __name__ == "__main__":
    for name in sys.argv[3:]:
        record(sys.argv[1], Path(sys.argv[2]), Path(name))
