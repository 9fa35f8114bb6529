"""What watching costs: ``python benchmarks/diagnostics.py [--rounds N]``.

Cold compile: the same model is compiled in fresh processes with fresh caches, with and without the hooks of
``explain``, in pairs whose order alternates. Steady state: one process, a compiled step of about 1 ms with one break
in it, blocks of steps with and without ``watch()`` in ABBA order. Printed are the ratios of the pairs with a 95 %
interval (order statistics of the median), the machine and the versions. The bounds that the project sets itself: 1.1
and 1.01."""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import tempfile
import time
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
start = time.perf_counter()
model(torch.randn(8, 64)).sum().backward()
print(time.perf_counter() - start)
"""


def cold_compile(watched: bool, folder: Path) -> float:
    """Seconds of one forward and backward compile by Inductor in a fresh process without any cache."""
    program = folder / "program.py"
    program.write_text(COMPILE)
    run = [str(program)]
    if watched:
        run = [child.__file__, str(folder / "events.jsonl"), "", "script", str(program)]
    environment = {**os.environ, "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    done = subprocess.run([sys.executable, *run], check=True, capture_output=True, env=environment, timeout=900)
    return float(done.stdout)


def compile_ratios(rounds: int) -> list[float]:
    """Watched over plain, one ratio a pair."""
    ratios = []
    for number in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            order = (False, True) if number % 2 == 0 else (True, False)
            seconds = {watched: cold_compile(watched, Path(folder)) for watched in order}
        ratios.append(seconds[True] / seconds[False])
        print(f"  pair {number + 1}: {seconds[False]:.2f} s plain, {seconds[True]:.2f} s watched", flush=True)
    return ratios


def broken_step(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    for_the_first_graph = (x @ weight).tanh()
    torch._dynamo.graph_break()
    return (for_the_first_graph @ weight).sum()


def steady_ratios(rounds: int, steps: int = 200) -> tuple[list[float], float]:
    """Watched over plain, one ratio an ABBA block, and the plain step in microseconds."""
    torch.set_num_threads(1)
    x, weight = torch.randn(192, 320), torch.randn(320, 320)
    step = torch.compile(broken_step, backend="eager")
    for _ in range(20):
        step(x, weight)

    def block(watched: bool) -> float:
        if not watched:
            return _seconds(step, x, weight, steps)
        with dx.watch():
            return _seconds(step, x, weight, steps)

    ratios, plain = [], []
    for _ in range(rounds):
        a, b, c, d = block(False), block(True), block(True), block(False)
        ratios.append((b + c) / (a + d))
        plain.append((a + d) / 2 / steps * 1e6)
    return ratios, median(plain)


def _seconds(step: object, x: torch.Tensor, weight: torch.Tensor, steps: int) -> float:
    call = step
    start = time.perf_counter()
    for _ in range(steps):
        call(x, weight)  # type: ignore[operator]
    return time.perf_counter() - start


def show(name: str, ratios: list[float], bound: float) -> None:
    low, high = median_interval(ratios)
    print(f"{name}: ratio {median(ratios):.4f} (95 % {low:.4f} to {high:.4f}, {len(ratios)} pairs), bound {bound}")


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--rounds", type=int, default=6, help="pairs of cold compiles")
    arguments.add_argument("--blocks", type=int, default=30, help="ABBA blocks of steps")
    given = arguments.parse_args()
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    print(f"torch {torch.__version__}, Python {platform.python_version()}")
    ratios, plain = steady_ratios(given.blocks)
    print(f"step of {plain:.0f} us, two graphs and a break")
    show("watch, steady state", ratios, 1.01)
    show("explain, cold compile", compile_ratios(given.rounds), 1.1)


if __name__ == "__main__":
    main()
