"""The sequence ops alone: time against the compiled reference, and share of a copy measured in the same process.

python benchmarks/ops.py [--device cuda] [--dtype bfloat16] [--no-compile] [OP ...]

OPs are linear_scan, causal_conv1d, selective_scan and cross_entropy (benchmarks/cross_entropy.py, with its peers).

Every result is compared with the reference in float64 on a small call before anything is timed. The compiled arm is the
better of torch.compile's default and of coordinate descent. On a GPU inputs rotate through several sets, and a CUDA
graph takes the launches' gaps out of the op's arm.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

import opgraft
from opgraft.registry import find

CPU_SHAPE = (2, 512, 2048)
GPU_SHAPES = ((8, 4096, 4096), (1, 2048, 4096))
STATES = 16


@dataclass(frozen=True)
class Case:
    name: str
    op: str
    make: Callable[[], tuple[Any, ...]]


def cases(names: list[str], shape: tuple[int, int, int], device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    """Forward and backward of every op at one (batch, channels, length)."""
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


def check(op: str, dtype: torch.dtype, device: torch.device) -> None:
    """The op against its reference in float64, on its first sample."""
    spec = find(f"opgraft::{op}")
    assert spec is not None
    assert spec.samples is not None
    sample = next(iter(spec.samples(device, dtype)))
    exact = spec.reference(
        *(a.double() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in sample.args)
    )
    found = spec.op(*sample.args)
    pairs = zip(found, exact, strict=True) if isinstance(found, tuple) else [(found, exact)]
    for got, want in pairs:
        error = ((got.double() - want).norm() / want.norm()).item()
        assert error < 4 * torch.finfo(dtype).eps, f"{op}: error {error:.2g} in {dtype}"


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


def op_seconds(function: Callable[..., Any], sets: list[tuple[Any, ...]], device: torch.device) -> float:
    """Seconds a call; on a GPU through a graph of one call a set."""
    if device.type == "cpu":
        return seconds(lambda i: function(*sets[i % len(sets)]), device)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for args in sets:
            function(*args)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [function(*args) for args in sets]
    found = seconds(lambda i: graph.replay(), device) / len(sets)
    del kept
    return found


def compiled_seconds(function: Callable[..., Any], sets: list[tuple[Any, ...]], device: torch.device) -> float:
    best = math.inf
    for options in ({}, {"coordinate_descent_tuning": True}) if device.type == "cuda" else ({},):
        torch._dynamo.reset()
        compiled = torch.compile(function, options=options)
        best = min(best, seconds(lambda i, c=compiled: c(*sets[i % len(sets)]), device))  # type: ignore[misc]
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ops", nargs="*", default=["linear_scan", "causal_conv1d", "selective_scan"])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default=None, help="default: bfloat16 on a GPU, float32 on the CPU")
    parser.add_argument("--no-compile", action="store_true", help="leave out the compiled reference")
    given = parser.parse_args()
    device = torch.device(given.device)
    dtype = getattr(torch, given.dtype or ("bfloat16" if device.type == "cuda" else "float32"))
    where = torch.cuda.get_device_name() if device.type == "cuda" else f"{torch.get_num_threads()} CPU threads"
    if "cross_entropy" in given.ops:
        import cross_entropy

        given.ops.remove("cross_entropy")
        cross_entropy.run(device, dtype, not given.no_compile)
        if not given.ops:
            return
    source = torch.randn(2**27 if device.type == "cuda" else 2**22, device=device).to(dtype)
    target = torch.empty_like(source)
    copied = 2 * source.numel() * source.element_size() / seconds(lambda i: target.copy_(source), device)
    print(f"{where}, torch {torch.__version__}, opgraft {opgraft.__version__}, {dtype}, copy {copied / 1e9:.0f} GB/s")
    for name in given.ops:
        check(name, dtype, device)
    for shape in GPU_SHAPES if device.type == "cuda" else (CPU_SHAPE,):
        for case in cases(given.ops, shape, device, dtype):
            sets = [case.make() for _ in range(1 if device.type == "cpu" else 2 if math.prod(shape) > 1e8 else 6)]
            spec = find(f"opgraft::{case.op}")
            assert spec is not None
            assert spec.cost is not None
            took = op_seconds(spec.op, sets, device)
            share = 100 * spec.cost(*sets[0]).bytes / took / copied
            line = f"{case.name:32} {shape!s:18} forward {took * 1e6:10.1f} us {share:6.1f} % of the copy"
            if not given.no_compile:
                compiled = compiled_seconds(spec.reference, sets, device)
                line += f"   compiled {compiled * 1e6:10.1f} us, {compiled / took:5.1f}x"
            print(line, flush=True)
            if spec.backward is not None:
                line = backward_line(spec, case, sets, device, copied)
                print(line, flush=True)


def backward_line(spec: Any, case: Case, sets: list[tuple[Any, ...]], device: torch.device, copied: float) -> str:
    outputs = [spec.op(*args) for args in sets]
    if case.op == "linear_scan":
        backward = [(out, a[0], out, a[2], *a[3:]) for out, a in zip(outputs, sets, strict=True)]
    else:
        backward = [(out[0], None, *args) for out, args in zip(outputs, sets, strict=True)]
    took = op_seconds(spec.backward, backward, device)
    found = find(f"opgraft::{case.op}_backward")
    assert found is not None
    assert found.cost is not None
    share = 100 * found.cost(*backward[0]).bytes / took / copied
    return f"{'':51} backward {took * 1e6:9.1f} us {share:6.1f} % of the copy"


if __name__ == "__main__":
    main()
