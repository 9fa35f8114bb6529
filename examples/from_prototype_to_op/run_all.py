"""The driver: what each step costs a call, and what it breaks, measured now on this machine.

Shows: one row a step: host time a call at 1024 elements, as usual and under inference_mode (where autograd is out
of the way), time at a large size, its share of the copy bandwidth measured in the same process, and the answers of
properties.py. Each row comes from a process of its own, so that no
step's registrations, caches or crash touch another's. The table is Markdown.
Run:    python examples/from_prototype_to_op/run_all.py        [--json FILE]
Expect: one to three minutes; the two steps that compile C++ take another minute the first time.
"""

from __future__ import annotations

import argparse
import importlib
import json
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from reference import device, sample

ROWS = {
    "reference": "torch's own F.gelu",
    "step1_triton": "1 Triton kernel",
    "step2_load_inline": "2 load_inline",
    "step3_extension": "3 pybind11 extension",
    "step4_torch_library": "4 torch.library in Python",
    "step5_autograd_function": "5 autograd.Function",
    "step8_native_op": "8 torch.ops.opgraft.gelu",
}
LIMIT_S = 600
LARGE = {"cuda": 1 << 26, "cpu": 1 << 22}
COSTS = ("host us", "inference us", "large us", "share of copy")
MARK = "ROW "


def measure(module: str) -> dict[str, Any]:
    """One row, in this process."""
    # The step first: it sets up Triton's interpreter, and torch._dynamo, which properties needs, imports triton.
    step = importlib.import_module(module)
    import properties
    from timing import beside_copy_us, host_us

    op, interpreted = step.gelu, getattr(step, "INTERPRETED", False)
    where = device()
    row: dict[str, Any] = dict.fromkeys([*COSTS, *properties.QUESTIONS])
    if not interpreted:
        small, large = sample(1024), sample(1 << 10).repeat(LARGE[where.type] >> 10)
        row["host us"] = host_us(lambda: op(small), where)
        with torch.inference_mode():
            row["inference us"] = host_us(lambda: op(small), where)
        row["large us"], copy = beside_copy_us(lambda: op(large), large)
        row["share of copy"] = copy / row["large us"]
    asked = properties.INTERPRETER_QUESTIONS if interpreted else tuple(properties.QUESTIONS)
    x = sample(16, 64)
    return row | {name: properties.QUESTIONS[name](op, x) for name in asked}


def run_row(module: str) -> tuple[dict[str, Any] | None, str]:
    """A row from a process of its own; None and a sentence where this machine cannot run the step."""
    command = [sys.executable, __file__, "--row", module]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        return None, f"took longer than {LIMIT_S} s"
    for line in done.stdout.splitlines():
        if line.startswith(MARK):
            return json.loads(line.removeprefix(MARK)), ""
    if done.returncode == 0:
        return None, done.stdout.strip()
    last = (done.stderr.strip() or f"ended with code {done.returncode}").splitlines()[-1]
    return None, f"failed: {last}"


def machine() -> str:
    """Hardware and versions, in one line."""
    if torch.cuda.is_available():
        hardware = f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}"
    else:
        hardware = f"{processor()}, {torch.get_num_threads()} threads"
    return f"{hardware}, torch {torch.__version__}, Python {platform.python_version()}"


def processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def table(rows: dict[str, dict[str, Any] | None]) -> str:
    """The rows as a Markdown table with aligned columns; a dash is what was not measured."""
    large = LARGE[device().type].bit_length() - 1
    costs = {"host us": ".1f", "inference us": ".1f", "large us": ".0f", "share of copy": ".0%"}
    answers = [name for name in next((list(row) for row in rows.values() if row), []) if name not in COSTS]
    lines = [["step", "us a call", "in inference_mode", f"us at 2^{large}", "of the copy rate", *answers]]
    for module, row in rows.items():
        found = row or {}
        cells = ["-" if found.get(name) is None else format(found[name], how) for name, how in costs.items()]
        lines.append([ROWS[module], *cells, *(found.get(name) or "-" for name in answers)])
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    padded = [[cell.ljust(width) for cell, width in zip(line, widths, strict=True)] for line in lines]
    text = ["| " + " | ".join(line) + " |" for line in padded]
    text.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(text)


def main() -> int:
    parser = argparse.ArgumentParser(description="measures every step and prints one table")
    parser.add_argument("--row", choices=ROWS, help="measure one step in this process and print it as JSON")
    parser.add_argument("--json", type=Path, help="write the measured rows to this file as well")
    arguments = parser.parse_args()
    if arguments.row:
        print(MARK + json.dumps(measure(arguments.row)))
        return 0

    rows, missing = {}, {}
    for module, name in ROWS.items():
        print(f"measuring {name} ...", file=sys.stderr, flush=True)
        rows[module], sentence = run_row(module)
        if sentence:
            missing[module] = sentence
    print(f"\n{machine()}; float32, inference; python examples/from_prototype_to_op/run_all.py\n")
    print(table(rows))
    for module, sentence in missing.items():
        print(f"\n{ROWS[module]}: {sentence}")
    triton = rows["step1_triton"]
    if triton is not None and triton["host us"] is None:
        print("\nTriton ran in its interpreter, whose speed and tracing say nothing about a real launch: not measured.")
    if arguments.json:
        arguments.json.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=2) + "\n")
    return 1 if any(sentence.startswith("failed") for sentence in missing.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
