"""``make demo``: the main job on a real compiled model, in one go.

A small transformer has a hand-written C++/CUDA GELU in its MLPs. It is compiled three ways: with the kernel bound raw
(pybind11), with the same kernel registered as an op, and with the op's meaning left to the compiler. The demo shows
where the raw kernel breaks the graph and what that costs, and whether the kernel is worth having in this model.
Everything lands in build/demo/report.html and report.json.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from pathlib import Path

import msgspec
import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

sys.path.insert(0, str(Path(__file__).resolve().parent))

import raw_gelu
import transformer_block

from opgraft import diagnostics as dx
from opgraft.diagnostics.model import Report
from opgraft.diagnostics.report.html import write_html
from opgraft.diagnostics.report.json import write_json
from opgraft.diagnostics.report.terminal import print_report

STEPS = 12
OUT = Path(__file__).resolve().parents[1] / "build" / "demo"


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--seconds", type=float, default=40.0, help="time for timing, beside compiling (default 40)")
    options.add_argument("--out", type=Path, default=OUT, help="folder for report.html and report.json")
    chosen = options.parse_args()
    # torch warns about the raw kernel once a compile; the report says it better.
    warnings.filterwarnings("ignore", category=UserWarning, module=r"torch\.")
    console = Console()
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("building the raw extension", total=100)
        raw = dx.Swap(transformer_block, "activation", raw_gelu.extension().gelu)

        bar.update(task, description="explaining the model with the raw kernel", completed=10)
        model, inputs = transformer_block.build()
        with raw.installed():
            broken = _explained(model, inputs)

        bar.update(task, description="explaining the model with the registered op", completed=20)
        whole = _explained(model, inputs)

        def progress(message: str, share: float) -> None:
            bar.update(task, description=message, completed=30 + 70 * share)

        measured = dx.compare(
            model,
            inputs,
            ops=["opgraft::gelu"],
            arms=["eager", "op", "raw"],
            raw=raw,
            seconds=chosen.seconds,
            progress=progress,
        )
    report = _one_report(broken, measured)
    chosen.out.mkdir(parents=True, exist_ok=True)
    write_json(report, chosen.out / "report.json")
    write_html(report, chosen.out / "report.html")

    console.print("[bold]The kernel bound raw[/bold]: examples/transformer_block.py with examples/raw_gelu")
    print_report(broken, console=console)
    console.print()
    breaks = sum(finding.counts.sites for finding in whole.findings)
    graphs = whole.run.graphs if whole.run else 1
    console.print(f"[bold]The same kernel registered[/bold]: {breaks} breaks, {graphs} graph")
    console.print()
    print_report(msgspec.structs.replace(measured, explain=None, run=None), console=console)
    console.print()
    console.print(f"report: {_short(chosen.out / 'report.html')} · {_short(chosen.out / 'report.json')}")


def _explained(model: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> Report:
    """What a few steps of the compiled model break on; the steps after the first show what a break costs."""
    torch._dynamo.reset()
    with torch.no_grad(), dx.watch() as watched:
        compiled = torch.compile(model)
        for _ in range(STEPS):
            compiled(*inputs)
    return watched.report()


def _one_report(broken: Report, measured: Report) -> Report:
    """The raw arm's breaks and the comparison, as one report."""
    return msgspec.structs.replace(
        broken,
        findings=(*broken.findings, *measured.findings),
        ledger=measured.ledger,
        degraded=tuple(dict.fromkeys((*broken.degraded, *measured.degraded))),
    )


def _short(path: Path) -> str:
    try:
        return str(path.resolve().relative_to(Path.cwd()))
    except ValueError:
        return str(path)


if __name__ == "__main__":
    main()
