"""The ops over rows, alone: forward and backward, against torch.compile at its best of two settings, Liger and quack.

Called by benchmarks/ops.py. On the CPU the op and the compiled reference take turns. On a GPU every arm is a CUDA graph
over rotated inputs. The published kernels (see row_peers.py) are compared with the op before they are timed.
Shares are of the copy that ops.py measures in the same process, on the bytes of an ideal kernel: five passes over x for
rms_norm with its gradient, eight for add_rms_norm.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from goals import SHARES, verdict
from row_peers import norms

from opgraft.registry import find

NAMES = ("rms_norm", "add_rms_norm", "rms_norm_fp8", "add_rms_norm_fp8", "silu_mul_fp8")
GPU_NORMS = ((131072, 1024), (32768, 4096), (131072, 8192), (32768, 16384))
GPU_FP8 = {"rms_norm_fp8": (32768, 4096), "add_rms_norm_fp8": (32768, 4096), "silu_mul_fp8": (16384, 14336)}
CPU_NORMS = ((8192, 4096),)
DECODE_ROWS = (1, 16, 64)
COLD_BYTES = 3e8  # of the inputs of all sets together, several times an L2

Arm = Callable[..., Any]


@dataclass(frozen=True)
class Case:
    """One line: what is called on ``make()``, with and without the op, and the bytes of an ideal kernel."""

    name: str
    make: Callable[[], tuple[Any, ...]]
    op: Arm
    reference: Arm
    bytes: int
    peers: dict[str, Arm] = field(default_factory=dict)
    goal: float | None = None  # share of the copy


def _with_gradient(function: Arm, inputs: int) -> Arm:
    """Forward and backward; the last of the arguments are the incoming gradients, one an output."""

    def step(*args: Any) -> Any:
        given, grads = args[:inputs], args[inputs:]
        out = function(*given)
        outputs = out if isinstance(out, tuple) else (out,)
        return torch.autograd.grad(outputs, [g for g in given if g.requires_grad], grads)

    return step


def cases(names: list[str], device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    gpu = device.type == "cuda"

    def tensor(*sizes: int, grad: bool = False) -> torch.Tensor:
        return torch.randn(sizes, device=device).to(dtype).requires_grad_(grad)

    element = torch.empty(0, dtype=dtype).element_size()
    for name in names:
        spec = find(f"opgraft::{name}")
        assert spec is not None
        assert spec.public is not None
        peers = norms(name) if gpu else {}
        if name in ("rms_norm", "add_rms_norm"):
            rows = 1 if name == "rms_norm" else 2
            for shape in GPU_NORMS if gpu else CPU_NORMS:
                size, weight = shape[0] * shape[1] * element, shape[1:]

                def both(shape: Any = shape, weight: Any = weight, rows: int = rows) -> tuple[Any, ...]:
                    given = [tensor(*shape, grad=True) for _ in range(rows)]
                    return (*given, tensor(*weight, grad=True), *(tensor(*shape) for _ in range(rows)))

                def forward(shape: Any = shape, weight: Any = weight, rows: int = rows) -> tuple[Any, ...]:
                    return (*(tensor(*shape) for _ in range(rows)), tensor(*weight))

                step = (_with_gradient(spec.public, rows + 1), _with_gradient(spec.reference, rows + 1))
                yield Case(f"{name} {shape}, forward", forward, spec.public, spec.reference, 2 * rows * size, peers)
                theirs = {peer: _with_gradient(call, rows + 1) for peer, call in peers.items()}
                moved = (5 if rows == 1 else 8) * size
                goal = SHARES[name, "with gradient"] if gpu else None
                yield Case(f"{name} {shape}, with gradient", both, *step, moved, theirs, goal)
        shapes = [GPU_FP8[name]] if name in GPU_FP8 and gpu else [(2048, 4096)] if name in GPU_FP8 else []
        width = GPU_FP8[name][1] if name in GPU_FP8 else 4096
        shapes += [(count, width) for count in DECODE_ROWS] if gpu else []
        for shape in shapes:
            for block in (0, 128) if name in GPU_FP8 else (None,):
                yield _forward_case(name, spec, shape, block, tensor, peers)


def _forward_case(
    name: str, spec: Any, shape: tuple[int, int], block: int | None, tensor: Any, peers: dict[str, Arm]
) -> Case:
    tensors = 1 if name in ("rms_norm", "rms_norm_fp8") else 2
    weighted = name != "silu_mul_fp8"

    def make() -> tuple[Any, ...]:
        return (*(tensor(*shape) for _ in range(tensors)), *((tensor(shape[1]),) if weighted else ()))

    options = () if block is None else (1e-6, 0.0, False, block) if weighted else (block,)
    kind = "" if block is None else "a scale a row" if block == 0 else "1x128"
    many = shape == GPU_FP8.get(name)
    return Case(
        f"{name} {shape}" + (f", {kind}" if kind else ""),
        make,
        lambda *a: spec.public(*a, *options),
        lambda *a: spec.reference(*a, *options),
        spec.cost(*make(), *options).bytes,
        peers,
        goal=SHARES.get((name, kind)) if many else None,
    )


def check(case: Case, name: str, peer: Arm, args: tuple[Any, ...]) -> None:
    """A peer's results against the op's, within a few roundings of each tensor as a whole."""
    ours, theirs = ((out if isinstance(out, tuple) else (out,)) for out in (case.op(*args), peer(*args)))
    for index, (own, other) in enumerate(zip(ours, theirs, strict=True)):
        off = ((own.float() - other.float()).norm() / own.float().norm()).item()
        assert off < 4 * torch.finfo(own.dtype).eps, f"{case.name}, {name}: result {index} off by {off:.2g}"


def settle(call: Callable[[], Any], seconds: float = 0.1) -> None:
    """Calls until a GPU has got over what was done before: for some 20 ms after random numbers were drawn an H200 takes
    a tenth longer over the same kernel and buffers."""
    started = time.perf_counter()
    while time.perf_counter() - started < seconds:
        call()
        torch.cuda.synchronize()


def _median(call: Callable[[], Any], device: torch.device, repeats: int) -> float:
    times = []
    if device.type == "cuda":
        settle(call)
    for _ in range(repeats + 2):
        if device.type == "cuda":
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            call()
            end.record()
            torch.cuda.synchronize()
            times.append(begin.elapsed_time(end) / 1e3)
        else:
            started = time.perf_counter()
            call()
            times.append(time.perf_counter() - started)
    return statistics.median(times[2:])


def seconds(arm: Arm, sets: list[tuple[Any, ...]], device: torch.device) -> float:
    """Seconds a call; on a GPU from a graph of one call a set, so that launches are not what is timed."""
    if device.type == "cpu":
        return _median(lambda: [arm(*args) for args in sets], device, 9) / len(sets)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for args in sets[:2]:
            arm(*args)
    torch.cuda.current_stream().wait_stream(side)
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        for args in sets:
            arm(*args)
    return _median(captured.replay, device, 15) / len(sets)


def in_turns(calls: list[Callable[[], Any]], rounds: int = 11) -> list[float]:
    """Median seconds of each call, one after the other in every round: what else the machine does meets all alike."""
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(rounds + 2):
        for call, taken in zip(calls, times, strict=True):
            started = time.perf_counter()
            call()
            taken.append(time.perf_counter() - started)
    return [statistics.median(taken[2:]) for taken in times]


def compiled_seconds(case: Case, sets: list[tuple[Any, ...]], device: torch.device) -> float:
    best = float("inf")
    for options in ({}, {"coordinate_descent_tuning": True}) if device.type == "cuda" else ({},):
        torch._dynamo.reset()
        compiled = torch.compile(case.reference, options=options, dynamic=False)
        for args in sets[:2]:
            compiled(*args)
        best = min(best, seconds(compiled, sets, device))
    return best


def run(names: list[str], device: torch.device, dtype: torch.dtype, copied: float, compile: bool) -> None:
    for case in cases(names, device, dtype):
        if device.type == "cpu":
            count = 1
        else:
            count = max(1, min(40, int(COLD_BYTES / case.bytes) + 1))
        sets = [case.make() for _ in range(count)]
        if device.type == "cpu" and compile:
            torch._dynamo.reset()
            compiled = torch.compile(case.reference, dynamic=False)
            took, theirs = in_turns([partial(arm, *sets[0]) for arm in (case.op, compiled)])
        else:
            took = seconds(case.op, sets, device)
        share = case.bytes / took / copied
        peers: list[float] = []
        line = f"{case.name:48} {took * 1e6:10.1f} us {100 * share:6.1f} % of the copy"
        if compile:
            if device.type == "cuda":
                theirs = compiled_seconds(case, sets, device)
            peers.append(theirs)
            line += f"   compiled {theirs * 1e6:10.1f} us, {theirs / took:5.2f}x"
        for name, peer in case.peers.items():
            check(case, name, peer, sets[0])
            theirs = seconds(peer, sets, device)
            peers.append(theirs)
            line += f"   {name} {theirs * 1e6:10.1f} us, {theirs / took:5.2f}x"
        print(f"{line}   {verdict(took, share, case.goal, peers)}", flush=True)
        del sets
        if device.type == "cuda":
            torch.cuda.empty_cache()
