"""Two ranks of one job as processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

# Gloo's threads end their process with an abort about once in a hundred times when it takes them down.
_LEAVE = """
import os, sys, torch.distributed
torch.distributed.barrier()
sys.stdout.flush()
os._exit(0)
"""


def run_ranks(program: str, folder: Path, case: str, seconds: float = 250.0) -> list[str]:
    """Runs a program as rank 0 and 1, with its rank, a folder, these tests' folder and a case as arguments; gives the
    last line that each printed."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    running = [
        subprocess.Popen(
            [sys.executable, "-c", program + _LEAVE, str(rank), str(folder), str(Path(__file__).parent), case],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for rank in range(2)
    ]
    try:
        results = [process.communicate(timeout=seconds) for process in running]
    finally:
        for process in running:
            process.kill()
    assert [p.returncode for p in running] == [0, 0], [error[-3000:] for _, error in results]
    return [out.splitlines()[-1] for out, _ in results]
