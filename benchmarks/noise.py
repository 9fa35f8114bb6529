"""Real A/A runs: one program against itself, as often as asked. How many say FASTER or SLOWER?

    python benchmarks/noise.py [--runs 100] [--blocks 32] [--copies 3] [--json F]

Every run takes its own blocks, one after the other, on the machine as it is (other load included). Each pair of copies
is judged as ``opgraft compare`` judges an arm against the compiler, and another pair stands for the A/A arm that every
comparison has. More copies give more verdicts in the same time; pairs that share a copy are not independent.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn

from opgraft.diagnostics.measure import clock, environment, statistics
from opgraft.diagnostics.measure.arms import Plan, make_arm
from opgraft.diagnostics.measure.blocks import run_blocks
from opgraft.diagnostics.measure.subject import subject_of


def model() -> tuple[nn.Module, torch.Tensor]:
    """A small MLP: short steps are the noisiest ones."""
    torch.manual_seed(0)
    cuda = torch.cuda.is_available()
    device, dtype, width = ("cuda", torch.bfloat16, 1024) if cuda else ("cpu", torch.float32, 128)
    layers = [nn.Sequential(nn.Linear(width, width), nn.GELU(approximate="tanh")) for _ in range(4)]
    return nn.Sequential(*layers).to(device=device, dtype=dtype), torch.randn(64, width, device=device, dtype=dtype)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--blocks", type=int, default=statistics.FIRST_LOOK)
    parser.add_argument("--copies", type=int, default=3, help="at least three")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds after which no further run starts")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    net, x = model()
    subject = subject_of(net, x, train=False)
    device = subject.device
    names = [f"copy {number}" for number in range(max(3, options.copies))]
    arms = [make_arm(Plan(name), subject, {}) for name in names]
    pairs = list(itertools.combinations(names, 2))
    for arm in arms:
        assert arm.step is not None
        for _ in range(5):
            arm.step()
    seconds = {a.name: clock.settle(a.step, device, 3.0) for a in arms if a.step is not None}
    counts: dict[str, int] = {}
    effects: list[float] = []
    widths: list[float] = []
    covered = runs = 0
    begin = time.monotonic()
    with environment.pinned(device):
        for run in range(options.runs):
            if time.monotonic() - begin > options.limit:
                break
            series = run_blocks(
                arms, device, deadline=time.monotonic(), least=options.blocks, most=options.blocks, seed=run,
                step_seconds=seconds,
            )  # fmt: skip
            runs += 1
            intervals = {pair: statistics.interval([series.ratios(*pair)]) for pair in pairs}
            for place, pair in enumerate(pairs):
                found = intervals[pair]
                assert found is not None
                others = [p for p in pairs[place + 1 :] + pairs[:place] if p[0] not in pair or p[1] not in pair]
                apart = next((p for p in others if not set(p) & set(pair)), others[0])
                said = statistics.verdict(found, noise=intervals[apart])
                counts[said] = counts.get(said, 0) + 1
                covered += found.low <= 0 <= found.high
                effects.append(found.estimate)
                widths.append((found.high - found.low) / 2)
    verdicts = len(effects)
    false = counts.get("FASTER", 0) + counts.get("SLOWER", 0)
    print(
        f"{runs} A/A runs of {options.blocks} blocks and {len(names)} copies, step {1e6 * seconds[names[0]]:.0f} us: "
        f"{counts}\nFASTER or SLOWER in {false} of {verdicts}; the 95 % interval holds 1 in {covered / verdicts:.1%}\n"
        f"largest ratio off by {np.max(np.abs(effects)):.2%}, median half-width {np.median(widths):.2%}\n"
        f"{environment.describe(device)}, load average {os.getloadavg()[0]:.1f}, {time.monotonic() - begin:.0f} s"
    )
    if options.json:
        found_json = {
            "runs": runs,
            "counts": counts,
            "verdicts": verdicts,
            "covered": covered / verdicts,
            "effects": effects,
            "half_widths": widths,
        }
        options.json.write_text(json.dumps(found_json))


if __name__ == "__main__":
    main()
