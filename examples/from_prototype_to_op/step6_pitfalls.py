"""Step 6, the pitfalls: each shown failing safely, then mended.

Shows: five mistakes of nearly every first kernel (non-contiguous input, wrong stream, wrong device, unchecked launch,
no dispatch on the dtype) and a sixth that only compiled models meet (a fake with other strides than the kernel).
Each is a file pitfall_*.py with wrong() beside mended(), run here in a process of its own under a time limit.
Run:    python examples/from_prototype_to_op/step6_pitfalls.py
Expect: WRONG and MENDED lines for each. Two need a GPU and say so on a CPU, half of one needs two GPUs.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PITFALLS = ("non_contiguous", "wrong_stream", "wrong_device", "unchecked_launch", "dtype_dispatch", "fake_strides")
LIMIT_S = 300


def main() -> int:
    failed = []
    for name in PITFALLS:
        print(f"== {name.replace('_', ' ')}", flush=True)
        file = Path(__file__).with_name(f"pitfall_{name}.py")
        if subprocess.run([sys.executable, str(file)], timeout=LIMIT_S).returncode:
            failed.append(name)
    if failed:
        print(f"did not behave as described: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
