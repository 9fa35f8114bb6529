"""A failed launch goes unnoticed.

**What it means.** At a size that no launch of the kernel can have (more threads a block, or blocks a grid, than the
device takes) the op returns as if nothing had happened, with a result that nobody wrote.

**Why it matters.** The numbers are whatever was in that memory; the error surfaces in somebody else's op, or never.

Fails: ``kernel<<<1, n, 0, stream>>>(...)`` alone. Passes: the same with ``cudaGetLastError()`` checked after it.

**Remedies.** ``check-launch``.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from opgraft.diagnostics.conform.lab import vary
from opgraft.diagnostics.conform.lab.bench import Bench, Fault, sentence
from opgraft.diagnostics.conform.lab.case import Case, describe
from opgraft.diagnostics.conform.lab.tree import tensors
from opgraft.diagnostics.conform.unstable_result import call
from opgraft.diagnostics.conform.wrong_stream import needs_gpu

KIND = "unchecked-launch"
# Over the limits of threads a block (1024) and of blocks in y and z (65,535).
SIZES = (1025, 4097, 65_537, 131_073)
MOST_ELEMENTS = 1 << 26


def unwritten(outputs: list[torch.Tensor]) -> bool:
    """Every floating result is NaN from end to end: fresh memory was filled with it."""
    found = [out for out in outputs if out.dtype.is_floating_point and out.numel()]
    return bool(found) and all(bool(torch.isnan(out).all()) for out in found)


def larger(base: Case) -> Iterator[Case]:
    for old in vary.extents(base)[:3]:
        for new in SIZES:
            if vary.elements_with(base, old, new) > MOST_ELEMENTS:
                continue
            found = vary.resized(base, old, new)
            if found is not None:
                yield found


def check(bench: Bench) -> Iterator[Fault]:
    needs_gpu(bench)
    for base in bench.cases[:2]:
        small = call(bench, base, filled=True)
        if not small.ok or unwritten(tensors(small.outputs)):
            continue
        for case in bench.usable(larger(base)):
            result = call(bench, case, filled=True)
            trouble = ""
            if result.ok and unwritten(tensors(result.outputs)):
                trouble = "returns memory that nobody wrote, and no error"
            elif result.ok:
                try:
                    torch.zeros(1, device=bench.device).add_(1)
                    torch.cuda.synchronize()
                except RuntimeError as error:
                    trouble = f"leaves its error to the next op: {sentence(error)}"
            if trouble:
                yield Fault(
                    f"{bench.name} {trouble}: a launch failed", case, evidence=(f"called with {describe(case)}",)
                )
                return
