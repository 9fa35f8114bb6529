"""DTensor sharding rules, in two gloo processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_sharded_ops_equal_the_whole() -> None:
    script = Path(__file__).with_name("sharded.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert "sharded ops agree" in done.stdout
