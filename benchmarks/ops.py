"""The sequence ops alone: time against the compiled reference and against published kernels, and share of a copy.

python benchmarks/ops.py [--device cuda] [--dtype bfloat16] [--no-compile] [--no-peers] [--peer-sources DIR]
                         [--large-only] [linear_scan causal_conv1d selective_scan]
python benchmarks/ops.py [...] rms_norm add_rms_norm rms_norm_fp8 add_rms_norm_fp8 silu_mul_fp8      (see row_ops.py)
python benchmarks/ops.py [...] cross_entropy                                                      (see cross_entropy.py)

Every result, ours and the others', is checked before anything is timed: ours against the reference in float64, the
others' against ours. The compiled arm is the best of several settings. On a GPU inputs rotate through several sets, and
a CUDA graph takes the launches' gaps out of every arm but the compiled one. Shares are of a copy measured in the same
process, on the bytes that an ideal kernel moves; selective_scan also has the share of the exponential units' rate.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peers as published
import row_ops
import torch

import opgraft
from opgraft.registry import OpSpec, find

CPU_SHAPE = (2, 512, 2048)
GPU_SHAPES = ((8, 4096, 4096), (1, 2048, 4096))
STATES = 16
CALLS = 12  # a graph
EXPONENTIALS_A_CLOCK = 16  # of one multiprocessor
SETTINGS: dict[str, tuple[dict[str, Any], ...]] = {
    "cuda": ({}, {"coordinate_descent_tuning": True}, {"max_autotune": True, "coordinate_descent_tuning": True}),
    "cpu": ({}, {"max_autotune": True}),
}


@dataclass(frozen=True)
class Case:
    name: str
    op: str
    make: Callable[[], tuple[Any, ...]]


@dataclass(frozen=True)
class Machine:
    device: torch.device
    copied: float  # bytes a second, read and written
    exponentials: float  # a second; 0 where it is not known


def cases(names: list[str], shape: tuple[int, int, int], device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    """Every op at one (batch, channels, length), in each of its layouts."""
    batch, channels, length = shape
    wide = torch.promote_types(dtype, torch.float32)

    def normal(*sizes: int, kind: torch.dtype = dtype) -> torch.Tensor:
        return torch.randn(sizes, device=device, dtype=kind)

    if "linear_scan" in names:
        for dim, sizes in ((-1, shape), (1, (batch, length, channels))):

            def scan(dim: int = dim, sizes: tuple[int, ...] = sizes) -> tuple[Any, ...]:
                return torch.rand(sizes, device=device).to(dtype), normal(*sizes), None, dim, False

            yield Case(f"linear_scan, time {'last' if dim < 0 else 'first'}", "linear_scan", scan)
    if "causal_conv1d" in names:
        for last in (False, True):

            def conv(last: bool = last) -> tuple[Any, ...]:
                x = normal(batch, length, channels) if last else normal(batch, channels, length)
                return x, normal(channels, 4), normal(channels), None, None, True, last

            yield Case(f"causal_conv1d, channels {'last' if last else 'first'}", "causal_conv1d", conv)
    if "selective_scan" in names:

        def selective() -> tuple[Any, ...]:
            decay = -torch.arange(1, STATES + 1, device=device, dtype=wide).repeat(channels, 1)
            matrices = (normal(batch, 1, STATES, length), normal(batch, 1, STATES, length))
            row, ones = (batch, channels, length), torch.ones(channels, device=device, dtype=wide)
            return normal(*row), normal(*row) * 0.5 - 3, decay, *matrices, ones, normal(*row), 0 * ones, True, None

        yield Case(f"selective_scan, {STATES} states", "selective_scan", selective)


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    return ((got.double() - want.double()).norm() / want.double().norm()).item()


def check(op: str, dtype: torch.dtype, device: torch.device) -> None:
    """The op and its gradient against the reference in float64, on the first sample of each."""
    for name in (f"opgraft::{op}", f"opgraft::{op}_backward"):
        spec = record(name)
        assert spec.samples is not None
        sample = next(iter(spec.samples(device, dtype)))
        exact = spec.reference(
            *(a.double() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in sample.args)
        )
        found = spec.op(*sample.args)
        for got, want in zip(found, exact, strict=True) if isinstance(found, tuple) else [(found, exact)]:
            off = error(got, want)
            assert off < 4 * torch.finfo(dtype).eps, f"{name}: error {off:.2g} in {dtype}"


def record(name: str) -> OpSpec:
    spec = find(name)
    assert spec is not None, f"{name} has no record"
    return spec


def seconds(call: Callable[[int], Any], device: torch.device, repeats: int = 12) -> float:
    """Median of single calls, after warm-up."""
    times = []
    for i in range(repeats + 3):
        if device.type == "cuda":
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            call(i)
            end.record()
            torch.cuda.synchronize()
            times.append(begin.elapsed_time(end) / 1e3)
        else:
            started = time.perf_counter()
            call(i)
            times.append(time.perf_counter() - started)
    return statistics.median(times[3:])


def graph_seconds(function: Callable[..., Any], sets: list[tuple[Any, ...]], device: torch.device) -> float:
    """Seconds a call; on a GPU through a graph of about CALLS calls, which divides the cost of launching it."""
    if device.type == "cpu":
        return seconds(lambda i: function(*sets[i % len(sets)]), device)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for args in sets:
            function(*args)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    rounds = -(-CALLS // len(sets))
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for args in sets:
                function(*args)
    return seconds(lambda i: graph.replay(), device) / (rounds * len(sets))


def compiled_seconds(
    function: Callable[..., Any], sets: list[tuple[Any, ...]], device: torch.device
) -> tuple[float, str]:
    """The best setting's seconds, and its name."""
    best, name = math.inf, ""
    for options in SETTINGS[device.type]:
        torch._dynamo.reset()
        compiled = torch.compile(function, options=options, dynamic=False)
        took = seconds(lambda i, c=compiled: c(*sets[i % len(sets)]), device)  # type: ignore[misc]
        if took < best:
            best, name = took, ", ".join(options) or "default"
    return best, name


def forward_and_backward(spec: OpSpec) -> Callable[..., Any]:
    """One call of the op and one of its backward op, with the result in place of its gradient."""

    def both(*args: Any) -> Any:
        out = spec.op(*args)
        assert spec.backward is not None
        if isinstance(out, tuple):
            return spec.backward(out[0], None, *args)
        return spec.backward(out, args[0], out, *args[2:])

    return both


def differentiated(call: Callable[..., torch.Tensor], leaves: tuple[int, ...]) -> Callable[..., Any]:
    """Forward and backward of a differentiable function through autograd, gradients of the leaves."""

    def both(*args: Any) -> Any:
        given = [a.detach().requires_grad_() if i in leaves and a is not None else a for i, a in enumerate(args)]
        out = call(*given)
        wanted = [given[i] for i in leaves if given[i] is not None]
        return torch.autograd.grad(out, wanted, out.detach(), allow_unused=True)

    return both


def shares(spec: OpSpec, args: tuple[Any, ...], took: float, both: bool, machine: Machine) -> str:
    """Share of the copy rate; where exponentials weigh more than bytes, of their rate too."""
    assert spec.cost is not None
    cost = spec.cost(*args)
    moved, exponentials = cost.bytes, cost.exponentials
    if both:
        out = spec.op(*args)
        behind = record(f"{spec.name}_backward")
        assert behind.cost is not None
        given = (out[0], None, *args) if isinstance(out, tuple) else (out, args[0], out, *args[2:])
        more = behind.cost(*given)
        moved, exponentials = moved + more.bytes, exponentials + more.exponentials
    text = f"{100 * moved / took / machine.copied:5.1f} % of the copy"
    if machine.exponentials and exponentials / machine.exponentials > moved / machine.copied:
        text += f", {100 * exponentials / took / machine.exponentials:5.1f} % of the exponentials"
    return text


def compare(case: Case, shape: tuple[int, int, int], machine: Machine, given: argparse.Namespace) -> None:
    device = machine.device
    spec = record(f"opgraft::{case.op}")
    sets = [case.make() for _ in range(1 if device.type == "cpu" else 2 if math.prod(shape) > 1e8 else 6)]
    ours = {False: graph_seconds(spec.op, sets, device), True: graph_seconds(forward_and_backward(spec), sets, device)}
    print(f"{case.name} {shape}")

    def line(arm: str, took: float, both: bool) -> None:
        ratio = "" if arm == "opgraft" else f"   {took / ours[both]:5.2f}x opgraft's time"
        what = "forward and backward" if both else "forward"
        print(
            f"  {arm:24} {what:20} {took * 1e6:10.1f} us  {shares(spec, sets[0], took, both, machine)}{ratio}",
            flush=True,
        )

    for both in (False, True):
        line("opgraft", ours[both], both)
    if not given.no_compile:
        took, setting = compiled_seconds(spec.reference, sets, device)
        line(f"compiled ({setting})", took, False)
    if given.no_peers or device.type == "cpu":
        return
    out = spec.op(*sets[0])
    wanted = out[0] if isinstance(out, tuple) else out
    for peer in published.peers(case.op, sets[0]):
        try:
            off = error(peer.call(*sets[0]), wanted)
            if not off < 16 * torch.finfo(wanted.dtype).eps:
                print(f"  {peer.name:24} is off by {off:.2g} of the result: not timed")
                continue
            line(peer.name, graph_seconds(peer.call, sets, device), False)
            line(peer.name, graph_seconds(differentiated(peer.call, peer.leaves), sets, device), True)
        except Exception as problem:  # what a published kernel raises is its own affair: the comparison goes on
            print(f"  {peer.name:24} failed: {type(problem).__name__}: {str(problem)[:200]}")


def measure_machine(device: torch.device, dtype: torch.dtype) -> Machine:
    source = torch.randn(2**27 if device.type == "cuda" else 2**22, device=device).to(dtype)
    target = torch.empty_like(source)
    copied = 2 * source.numel() * source.element_size() / graph_seconds(target.copy_, [(source,)], device)
    if device.type == "cpu":
        return Machine(device, copied, 0.0)
    properties = torch.cuda.get_device_properties(device)
    clock = 1e3 * getattr(properties, "clock_rate", 1_980_000)
    return Machine(device, copied, properties.multi_processor_count * EXPONENTIALS_A_CLOCK * clock)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ops", nargs="*", default=["linear_scan", "causal_conv1d", "selective_scan"])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default=None, help="default: bfloat16 on a GPU, float32 on the CPU")
    parser.add_argument("--no-compile", action="store_true", help="leave out the compiled reference")
    parser.add_argument("--no-peers", action="store_true", help="leave out the published kernels")
    parser.add_argument("--peer-sources", type=Path, default=None, help="build causal_conv1d and mamba_ssm from here")
    parser.add_argument("--large-only", action="store_true", help="the first of the GPU's shapes alone")
    given = parser.parse_args()
    device = torch.device(given.device)
    dtype = getattr(torch, given.dtype or ("bfloat16" if device.type == "cuda" else "float32"))
    if given.peer_sources is not None:
        published.build(given.peer_sources)
    machine = measure_machine(device, dtype)
    where = torch.cuda.get_device_name() if device.type == "cuda" else f"{torch.get_num_threads()} CPU threads"
    print(
        f"{where}, torch {torch.__version__}, opgraft {opgraft.__version__}, {dtype}, "
        f"copy {machine.copied / 1e9:.0f} GB/s, {machine.exponentials / 1e12:.2f} T exponentials/s"
    )
    if "cross_entropy" in given.ops:
        import cross_entropy

        given.ops.remove("cross_entropy")
        cross_entropy.run(device, dtype, not given.no_compile)
    rows = [name for name in given.ops if name in row_ops.NAMES]
    if rows:
        row_ops.run(rows, device, dtype, machine.copied, compile=not given.no_compile)
        given.ops = [name for name in given.ops if name not in rows]
    for name in given.ops:
        check(name, dtype, device)
    shapes = GPU_SHAPES[: 1 if given.large_only else 2] if device.type == "cuda" else (CPU_SHAPE,)
    for shape in shapes:
        for case in cases(given.ops, shape, device, dtype):
            compare(case, shape, machine, given)


if __name__ == "__main__":
    main()
