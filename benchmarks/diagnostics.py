"""What watching costs: ``python benchmarks/diagnostics.py [--pairs N] [--lanes N] [--blocks N]``.

Cold compile: the same model is compiled in fresh processes with fresh caches, plain and under the hooks that ``opgraft
explain`` puts in by default (the recording of custom ops included), in pairs whose order alternates; several pairs run
side by side, each on cores of its own. Wall time and the process's CPU time are both given: on a busy machine the
second still tells.

Steady state: one process, many short blocks of steps with and without ``watch()``, in ABBA order. Two steps are
timed. One takes about 1 ms, as the bound is worded. The other has the same graphs and break around hardly any work:
what watching adds to a step does not depend on the step's length, so there it stands out of the noise, and is given as
a share of 1 ms. Ratios carry a 95 % interval (order statistics of the median). The bounds that the project sets
itself: 1.1 and 1.01."""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch

from opgraft import diagnostics as dx
from opgraft.diagnostics.collect import child
from opgraft.diagnostics.diagnose.cost import median_interval

COMPILE = """
import time
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 256), nn.Linear(256, 64)
    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))

torch.compile(nn.Linear(2, 2))(torch.randn(2, 2)).sum().backward()   # the compiler's own start
model = torch.compile(nn.Sequential(*[Block() for _ in range(4)]))
wall, cpu = time.perf_counter(), time.process_time()
model(torch.randn(8, 64)).sum().backward()
print(time.perf_counter() - wall, time.process_time() - cpu)
"""
ENVIRONMENT = {"TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1", "OMP_NUM_THREADS": "1"}


@dataclass(frozen=True)
class Compile:
    """Seconds of one forward and backward compile by Inductor."""

    wall: float
    cpu: float


def cold_compile(watched: bool, cores: set[int]) -> Compile:
    """One compile in a fresh process on ``cores``, with no cache."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        program = folder / "program.py"
        program.write_text(COMPILE)
        run = [str(program)]
        if watched:
            run = [child.__file__, str(folder / "events"), str(folder / "recording"), "script", str(program)]
        done = subprocess.run(
            [sys.executable, *run],
            check=True,
            capture_output=True,
            env={**os.environ, **ENVIRONMENT, "TORCHINDUCTOR_CACHE_DIR": str(folder / "cache")},
            timeout=900,
            preexec_fn=lambda: os.sched_setaffinity(0, cores),
        )
    wall, cpu = map(float, done.stdout.split())
    return Compile(wall, cpu)


def compile_pairs(pairs: int, lanes: int) -> list[tuple[Compile, Compile]]:
    """(plain, watched) of every pair."""
    cores = sorted(os.sched_getaffinity(0))
    share = max(1, len(cores) // lanes)

    def pair(number: int) -> tuple[Compile, Compile]:
        lane = number % lanes
        mine = set(cores[lane * share : (lane + 1) * share]) or set(cores)
        order = (False, True) if number // lanes % 2 == 0 else (True, False)
        found = {watched: cold_compile(watched, mine) for watched in order}
        print(
            f"  pair {number + 1}: wall {found[False].wall:.2f} s plain, {found[True].wall:.2f} s watched; "
            f"CPU {found[False].cpu:.2f} s, {found[True].cpu:.2f} s",
            flush=True,
        )
        return found[False], found[True]

    def lane_of(lane: int) -> list[tuple[Compile, Compile]]:
        return [pair(number) for number in range(lane, pairs, lanes)]

    with ThreadPoolExecutor(lanes) as pool:
        return [one for found in pool.map(lane_of, range(lanes)) for one in found]


def long_step(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    h = (x @ weight).tanh()
    torch._dynamo.graph_break()
    return (h @ weight).sum()


def inputs_of(seconds: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs for which :func:`long_step` takes about ``seconds`` on this machine."""
    weight = torch.randn(320, 320)
    took = median(_seconds(lambda x, w: (x @ w).tanh() @ w, (torch.randn(192, 320), weight), 1) for _ in range(30))
    return torch.randn(max(16, round(192 * seconds / took)), 320), weight


def short_step(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    h = x + weight
    torch._dynamo.graph_break()
    return h + weight


@dataclass(frozen=True)
class Steady:
    """Watched over plain, one ratio a block of ABBA; microseconds of a plain step; microseconds that watching adds."""

    ratios: list[float]
    plain_us: float
    added_us: list[float]


def steady(function: Callable[..., torch.Tensor], inputs: tuple[torch.Tensor, ...], blocks: int, steps: int) -> Steady:
    step = torch.compile(function, backend="eager")
    for _ in range(50):
        step(*inputs)
    ratios, plain, added = [], [], []
    for _ in range(blocks):
        a = _seconds(step, inputs, steps)
        with dx.watch():
            b, c = _seconds(step, inputs, steps), _seconds(step, inputs, steps)
        d = _seconds(step, inputs, steps)
        ratios.append((b + c) / (a + d))
        plain.append((a + d) / 2 / steps * 1e6)
        added.append((b + c - a - d) / 2 / steps * 1e6)
    return Steady(ratios, median(plain), added)


def _seconds(step: Callable[..., torch.Tensor], inputs: tuple[torch.Tensor, ...], steps: int) -> float:
    for _ in range(25):  # the interpreter adapts its bytecode again after names have changed
        step(*inputs)
    start = time.perf_counter()
    for _ in range(steps):
        step(*inputs)
    return time.perf_counter() - start


def show(name: str, values: list[float], bound: float) -> None:
    low, high = median_interval(values)
    print(
        f"{name}: {median(values):.4f} (95 % {low:.4f} to {high:.4f}, {len(values)} pairs), bound {bound}", flush=True
    )


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--pairs", type=int, default=8, help="pairs of cold compiles")
    arguments.add_argument("--lanes", type=int, default=1, help="pairs that run side by side")
    arguments.add_argument("--blocks", type=int, default=200, help="ABBA blocks of steps")
    given = arguments.parse_args()
    print(f"{cpu_name()}, {len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]:.1f}")
    print(f"torch {torch.__version__}, Python {platform.python_version()}")
    torch.set_num_threads(1)
    long = steady(long_step, inputs_of(1e-3), given.blocks, steps=20)
    print(f"watch, step of {long.plain_us:.0f} us, two graphs and a break")
    show("  ratio", long.ratios, 1.01)
    tiny = (torch.randn(4), torch.randn(4))
    short = steady(short_step, tiny, given.blocks, steps=100)
    low, high = median_interval(short.added_us)
    print(
        f"watch, step of {short.plain_us:.1f} us, the same graphs: adds {median(short.added_us):.2f} us a step "
        f"({low:.2f} to {high:.2f})"
    )
    show("  ratio for a step of 1 ms", [1 + us / 1000 for us in short.added_us], 1.01)
    if not given.pairs:
        return
    print("explain, cold compile with fresh caches", flush=True)
    found = compile_pairs(given.pairs, given.lanes)
    show("  wall time, ratio", [watched.wall / plain.wall for plain, watched in found], 1.1)
    show("  CPU time, ratio", [watched.cpu / plain.cpu for plain, watched in found], 1.1)


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


if __name__ == "__main__":
    main()
