"""cross_entropy, forward and with backward: against torch.compile at its best, and Liger and quack where installed.

python benchmarks/cross_entropy.py [--device cuda] [--dtype bfloat16] [--no-compile] [--linear]

Every arm's loss and gradient are compared with float64 on a few rows before it is timed; a published kernel (see
row_peers.py) that writes over the logits gets them back before every sample, outside the time. The compiled arm is the
best of several settings (on the CPU, where all arms take turns, of the default one), of torch's own cross entropy
(logits in float32, as transformers has it) and of the op's reference. The share is that of a copy in the same process,
on the bytes of an ideal kernel: one read, and one write where there is a gradient. ``python benchmarks/ops.py
cross_entropy`` runs it as well.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from goals import SHARES, verdict
from row_ops import in_turns, settle
from row_ops import seconds as graph_seconds
from row_peers import LossPeer, losses
from torch.nn import functional as F

import opgraft
from opgraft.ops.cross_entropy_reference import MEAN, reference

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

GPU_SHAPES = ((8192, 128256), (16384, 32000), (8192, 151936), (16384, 50257), (64, 128256))
GOAL_SHAPES = GPU_SHAPES[:3]
FEW_ROWS = ((1, 32000), (1, 128256), (8, 128256), (16, 151936), (64, 32000), (64, 128256))
COLD_BYTES = 2e8  # of the inputs of all sets together, several times an L2
CPU_SHAPES = ((2048, 32000),)
ARMS_IN_TURN = (
    "torch, compiled",
    "reference, compiled",
    "opgraft, compiled",
    "torch, backend opgraft",
    "opgraft",
    "torch",
)
CALLS = 4  # a sample; on a GPU the host runs ahead


def settings(device: torch.device) -> tuple[dict[str, Any], ...]:
    if device.type == "cpu":
        return ({},)
    return {}, {"coordinate_descent_tuning": True}, {"max_autotune": True}


def _torch(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.float(), target)


def _reference(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return reference(logits, target, None, -100, 0.0, 0.0, 0.0, MEAN)[0]


def _op(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    loss = opgraft.cross_entropy(logits, target)
    assert isinstance(loss, torch.Tensor)
    return loss


def seconds(
    call: Callable[[], Any], device: torch.device, samples: int = 9, before: Callable[[], Any] = lambda: None
) -> float:
    """Median of a call's time over samples of several calls, after warm-up; ``before`` each sample, and not timed."""
    times = []
    if device.type == "cuda":
        settle(call)
    for _ in range(samples + 2):
        if device.type == "cuda":
            before()
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            for _ in range(CALLS):
                call()
            end.record()
            torch.cuda.synchronize()
            times.append(begin.elapsed_time(end) / 1e3 / CALLS)
        else:
            started = time.perf_counter()
            call()
            times.append(time.perf_counter() - started)
    return statistics.median(times[2:])


def arm_of(loss: Loss) -> LossPeer:
    """A loss that autograd knows."""

    def both(logits: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        found = loss(logits, target)
        return found.detach(), torch.autograd.grad(found, logits)[0]

    return LossPeer(loss, both)


def check(name: str, arm: LossPeer, dtype: torch.dtype, device: torch.device) -> None:
    """Loss and gradient of a few rows against float64."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(4, 4096, generator=generator).to(device, dtype)
    target = torch.randint(0, 4096, (4,), generator=generator).to(device)
    exact = logits.double().requires_grad_()
    wanted = F.cross_entropy(exact, target, reduction="sum" if arm.rows else "mean")
    (wanted_gradient,) = torch.autograd.grad(wanted, exact)
    found, gradient = arm.both(logits.clone().requires_grad_(), target)
    error = ((gradient.double() - wanted_gradient).norm() / wanted_gradient.norm()).item()
    off = abs(found.sum().item() - wanted.item()) / wanted.item()
    assert error < 4 * torch.finfo(dtype).eps, f"{name}: gradient off by {error:.2g}"
    assert off < 4 * torch.finfo(dtype).eps, f"{name}: loss off by {off:.2g}"


def time_arm(arm: LossPeer, logits: torch.Tensor, target: torch.Tensor) -> tuple[float, float]:
    """Seconds of the forward alone, without a gradient, and of forward and backward."""
    plain = logits.detach()
    with torch.no_grad():
        forward = seconds(lambda: arm.forward(plain, target), logits.device)
    if not arm.in_place:
        return forward, seconds(lambda: arm.both(logits, target), logits.device)
    kept = plain.clone()
    both = seconds(lambda: arm.both(logits, target), logits.device, before=lambda: plain.copy_(kept))
    plain.copy_(kept)
    return forward, both


def compiled_best(logits: torch.Tensor, target: torch.Tensor) -> tuple[float, float]:
    best = (math.inf, math.inf)
    for options in settings(logits.device):
        for loss in (_torch, _reference):
            torch._dynamo.reset()
            took = time_arm(arm_of(torch.compile(loss, options=dict(options))), logits, target)
            best = (min(best[0], took[0]), min(best[1], took[1]))
    return best


def copy_rate(device: torch.device) -> float:
    """Bytes a second, read and written, by the faster of a copy and a kernel that negates: on an H200 the copy falls to
    two thirds at some sizes."""
    source = torch.randn(2**29 if device.type == "cuda" else 2**23, device=device).bfloat16()
    target = torch.empty_like(source)
    ways = (lambda: target.copy_(source), lambda: torch.neg(source, out=target))
    return 2 * source.numel() * source.element_size() / min(seconds(way, device) for way in ways)


def report(name: str, took: tuple[float, float], ideal: tuple[int, int], copied: float, line: str) -> None:
    shares = [100 * moved / each / copied for moved, each in zip(ideal, took, strict=True)]
    print(
        f"{line:16} {name:22} forward {took[0] * 1e6:10.1f} us {shares[0]:5.1f} %   "
        f"with backward {took[1] * 1e6:10.1f} us {shares[1]:5.1f} %",
        flush=True,
    )


def run_in_turns(logits: torch.Tensor, target: torch.Tensor, line: str, copied: float) -> None:
    """The CPU's arms with backward, each once in every round; ratios to the best that torch.compile makes of torch."""
    compiled = [torch.compile(loss, dynamic=False) for loss in (_torch, _reference, _op)]
    compiled.append(torch.compile(lambda logits, target: _torch(logits, target), backend="opgraft", dynamic=False))
    arms = dict(zip(ARMS_IN_TURN, (*compiled, _op, _torch), strict=True))
    calls = [lambda loss=loss: torch.autograd.grad(loss(logits, target), logits) for loss in arms.values()]  # type: ignore[misc]
    took = dict(zip(arms, in_turns(calls, rounds=7), strict=True))
    best = min(took[name] for name in ARMS_IN_TURN[:2])
    ideal = 2 * logits.numel() * logits.element_size()
    for name, each in took.items():
        print(
            f"{line:16} {name:30} with backward {each * 1e3:8.1f} ms {100 * ideal / each / copied:5.1f} % of the copy"
            f"   {best / each:5.2f}x the best compiled",
            flush=True,
        )


def run(device: torch.device, dtype: torch.dtype, with_compile: bool = True) -> None:
    where = torch.cuda.get_device_name() if device.type == "cuda" else f"{torch.get_num_threads()} CPU threads"
    copied = copy_rate(device)
    print(f"{where}, torch {torch.__version__}, opgraft {opgraft.__version__}, {dtype}, copy {copied / 1e9:.0f} GB/s")
    published = losses() if device.type == "cuda" else {}
    arms = {"opgraft": arm_of(_op), **published}
    for name, arm in arms.items():
        check(name, arm, dtype, device)
    for rows, classes in GPU_SHAPES if device.type == "cuda" else CPU_SHAPES:
        logits = torch.randn(rows, classes, device=device, dtype=dtype).requires_grad_()
        target = torch.randint(0, classes, (rows,), device=device)
        size = logits.numel() * logits.element_size()
        line = f"{rows}x{classes}"
        if with_compile and device.type == "cpu":
            run_in_turns(logits, target, line, copied)
            continue
        took = {"torch.compile, best": compiled_best(logits, target)} if with_compile else {}
        for name, arm in arms.items():
            try:
                took[name] = time_arm(arm, logits, target)
            except Exception as error:
                if name not in published:
                    raise
                reason = str(error).strip().splitlines() or [type(error).__name__]
                print(f"{line:16} {name:22} left out: {reason[0]}")
        for name, each in took.items():
            report(name, each, (size, 2 * size), copied, line)
        if device.type == "cuda":
            own = took.pop("opgraft")
            for index, kind in enumerate(("forward", "with gradient")):
                share = (1 + index) * size / own[index] / copied
                goal = SHARES["cross_entropy", kind] if (rows, classes) in GOAL_SHAPES else None
                print(f"{line:16} {kind}: {verdict(own[index], share, goal, [t[index] for t in took.values()])}")
        del logits, target
    if device.type == "cuda":
        few_rows(device, dtype, with_compile, published)


def few_rows(device: torch.device, dtype: torch.dtype, with_compile: bool, published: dict[str, LossPeer]) -> None:
    """Forward without a gradient, as in decoding or evaluation: graphs of calls over rotated inputs."""
    for rows, classes in FEW_ROWS:
        size = rows * classes * dtype.itemsize
        sets = [
            (torch.randn(rows, classes, device=device).to(dtype), torch.randint(0, classes, (rows,), device=device))
            for _ in range(max(8, min(40, int(COLD_BYTES / size))))
        ]
        with torch.no_grad():
            took = graph_seconds(_op, sets, device)
            line, theirs = f"{rows}x{classes:<12} in a graph, forward {took * 1e6:8.2f} us", []
            if with_compile:
                torch._dynamo.reset()
                theirs = [graph_seconds(torch.compile(_torch, dynamic=False), sets, device)]
                line += f"   compiled {theirs[0] * 1e6:8.2f} us"
            for name, peer in published.items():
                if not peer.in_place and not peer.rows:  # Liger's waits for the device
                    theirs.append(graph_seconds(peer.forward, sets, device))
                    line += f"   {name} {theirs[-1] * 1e6:8.2f} us"
        print(f"{line}   {verdict(took, None, None, theirs)}", flush=True)


def linear(device: torch.device, dtype: torch.dtype) -> None:
    """linear_cross_entropy against the logits as a whole: time and, on a GPU, the most memory beside the inputs."""
    rows, features, classes = (16384, 2048, 128256) if device.type == "cuda" else (1024, 256, 32000)
    hidden = torch.randn(rows, features, device=device, dtype=dtype).requires_grad_()
    weight = (torch.randn(classes, features, device=device, dtype=dtype) / features**0.5).requires_grad_()
    target = torch.randint(0, classes, (rows,), device=device)
    arms: dict[str, Callable[[], torch.Tensor]] = {
        "all logits, torch": lambda: F.cross_entropy(F.linear(hidden, weight).float(), target),
        "all logits, opgraft": lambda: _op(F.linear(hidden, weight), target),
        "linear_cross_entropy": lambda: opgraft.linear_cross_entropy(hidden, weight, target),  # type: ignore[dict-item, return-value]
    }
    for name, loss in arms.items():
        before = 0
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        took = seconds(lambda loss=loss: torch.autograd.grad(loss(), (hidden, weight)), device, samples=5)  # type: ignore[misc]
        peak = (
            f", peak {(torch.cuda.max_memory_allocated() - before) / 2**20:8.0f} MiB" if device.type == "cuda" else ""
        )
        print(f"{rows}x{features}x{classes:<8} {name:22} {took * 1e3:8.2f} ms{peak}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default=None, help="default: bfloat16 on a GPU, float32 on the CPU")
    parser.add_argument("--no-compile", action="store_true", help="leave out the compiled arms")
    parser.add_argument("--linear", action="store_true", help="linear_cross_entropy in place of cross_entropy")
    given = parser.parse_args()
    device = torch.device(given.device)
    dtype = getattr(torch, given.dtype or ("bfloat16" if device.type == "cuda" else "float32"))
    if given.linear:
        linear(device, dtype)
    else:
        run(device, dtype, not given.no_compile)


if __name__ == "__main__":
    main()
