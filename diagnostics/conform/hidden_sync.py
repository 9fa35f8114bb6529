"""The op waits for the device inside.

**What it means.** When the call comes back, everything that was queued before it is done.

**Why it matters.** The host can no longer run ahead of the device, and the op cannot be captured in a CUDA graph.

Fails: ``cudaDeviceSynchronize()`` after the launch, or ``.item()`` in the wrapper. Passes: neither.

**Remedies.** ``remove-sync``.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from opgraft.diagnostics.conform.lab.bench import Bench, Fault
from opgraft.diagnostics.conform.lab.memory import fresh_call
from opgraft.diagnostics.conform.wrong_stream import SLEEP_CYCLES, needs_gpu

KIND = "hidden-sync"


def check(bench: Bench) -> Iterator[Fault]:
    needs_gpu(bench)
    for case in bench.usable(iter(bench.cases[:2])):
        if not bench.real(case).ok:
            continue
        args, kwargs = fresh_call(case, requires_grad=False)
        bench.op(*args, **kwargs)
        torch.cuda.synchronize()
        done = torch.cuda.Event()
        bench.tell(case)
        torch.cuda._sleep(2 * SLEEP_CYCLES)
        done.record()
        with torch.no_grad():
            bench.op(*args, **kwargs)
        waited = done.query()
        torch.cuda.synchronize()
        if waited:
            yield Fault(f"{bench.name} waits for the device: work queued before the call is done when it returns", case)
            return
