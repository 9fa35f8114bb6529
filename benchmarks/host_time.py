"""Host microseconds an eager call of every op, beside the reference's: medians of interleaved rounds.

python benchmarks/host_time.py [--device cuda]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch

import opgraft  # noqa: F401  (fills the table)
from opgraft.registry import specs

ROUNDS = 7
CALLS = 3000


def microseconds(call: Callable[[], Any], device: torch.device) -> float:
    for _ in range(100):
        call()
    if device.type == "cuda":
        torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(CALLS):
        call()
    end = time.perf_counter()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return (end - begin) / CALLS * 1e6


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--device", default="cpu")
    device = torch.device(options.parse_args().device)
    print(f"torch {torch.__version__}, {device}, us a call, median of {ROUNDS} rounds of {CALLS} calls")
    for spec in specs("opgraft"):
        assert spec.samples is not None
        small = next(s for s in spec.samples(device, torch.float32) if s.name == "dense")
        forms: dict[str, Callable[[], Any]] = {
            "public function": lambda s=small, f=spec.public or spec.op: f(*s.args, **s.kwargs),
            "torch.ops": lambda s=small, f=spec.op: f(*s.args, **s.kwargs),
            "reference": lambda s=small, f=spec.reference: f(*s.args, **s.kwargs),
        }
        times = defaultdict(list)
        for _ in range(ROUNDS):
            for name, call in forms.items():
                times[name].append(microseconds(call, device))
        row = ", ".join(f"{name} {statistics.median(found):.1f}" for name, found in times.items())
        print(f"{spec.name}: {row}")


if __name__ == "__main__":
    main()
