"""Work is not on the current stream.

**What it means.** On a side stream, behind a long kernel that still writes the input, the op reads the old values.

**Why it matters.** It is right by luck on the default stream, and silently wrong under CUDA graphs, with prefetching,
or on any side stream.

Fails: ``kernel<<<grid, block>>>(...)``. Passes: ``kernel<<<grid, block, 0, stream>>>(...)`` with the current stream.

**Remedies.** ``use-current-stream``.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from opgraft.diagnostics.conform.lab.bench import Bench, Fault, NotApplicable
from opgraft.diagnostics.conform.lab.case import Case
from opgraft.diagnostics.conform.lab.memory import fresh_call
from opgraft.diagnostics.conform.lab.tree import map_tensors, tensors

KIND = "wrong-stream"
# About 0.2 s on an H200: far longer than a launch takes.
SLEEP_CYCLES = 400_000_000


def needs_gpu(bench: Bench) -> None:
    if bench.device.type != "cuda":
        raise NotApplicable("asked on a GPU only")


def trial(bench: Bench, case: Case, cycles: int = SLEEP_CYCLES) -> str:
    """What a call on a side stream, behind a kernel of so many cycles, gives against the same call at leisure."""
    wanted = bench.real(case)
    if not wanted.ok:
        return ""
    args, kwargs = fresh_call(case, requires_grad=False)
    targets = [tensor for tensor in tensors((args, kwargs)) if tensor.dtype.is_floating_point]
    sources = [tensor.clone() for tensor in targets]
    for target in targets:
        target.zero_()
    bench.op(
        *map_tensors(torch.clone, args), **map_tensors(torch.clone, kwargs)
    )  # warm: no lazy loading behind the sleep
    torch.cuda.synchronize()
    bench.tell(case)
    side = torch.cuda.Stream()
    with torch.no_grad(), torch.cuda.stream(side):
        if cycles:
            torch.cuda._sleep(cycles)
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source, non_blocking=True)
        if not cycles:
            torch.cuda.synchronize()
        outputs = bench.op(*args, **kwargs)
        kept = [tensor.clone() for tensor in tensors(outputs)]
    torch.cuda.synchronize()
    return bench.disagree(kept, tensors(wanted.outputs), case)


def check(bench: Bench) -> Iterator[Fault]:
    needs_gpu(bench)
    for case in bench.usable(iter(bench.cases[:3])):
        words = trial(bench, case)
        # The same with all work done before the call: where that is off too, it is for another reason.
        if words and not trial(bench, case, cycles=0):
            yield Fault(
                f"{bench.name} does not work on the current stream: behind a kernel that writes its input on a side "
                f"stream it reads the old values ({words})",
                case,
            )
            return
