"""No device guard, or a result on another device.

**What it means.** With a tensor on another device than the current one the op fails, gives wrong numbers, returns its
result elsewhere, or leaves another device current than before.

**Why it matters.** The second GPU of a machine is the first one where it shows.

Fails: a launch without a guard. Passes: ``DeviceGuard guard(x.get_device_index());`` before it.

**Remedies.** ``add-device-guard``.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from opgraft.diagnostics.conform.lab.bench import Bench, Fault, NotRun, sentence
from opgraft.diagnostics.conform.lab.tree import map_tensors, tensors
from opgraft.diagnostics.conform.wrong_stream import needs_gpu

KIND = "wrong-device"


def check(bench: Bench) -> Iterator[Fault]:
    needs_gpu(bench)
    current = torch.cuda.current_device()
    for case in bench.usable(iter(bench.cases[:2])):
        wanted = bench.real(case)
        if not wanted.ok:
            continue
        if torch.cuda.current_device() != current:
            yield Fault(f"{bench.name} leaves another device current than before the call", case)
            return
        places = {tensor.device for tensor in tensors(wanted.outputs)}
        if places - {bench.device, torch.device(bench.device.type, current)}:
            yield Fault(f"{bench.name} returns a result on {', '.join(map(str, places))}", case)
            return
        if torch.cuda.device_count() < 2:
            raise NotRun("the machine has one GPU")
        other = torch.device("cuda", 1 - current)
        args, kwargs = map_tensors(partial(torch.Tensor.to, device=other), (case.args, case.kwargs))
        moved = case.varied("device", f"on {other}, {torch.device('cuda', current)} current", args, kwargs)
        result = bench.real(moved)
        words = sentence(result.error) if not result.ok else bench.disagree(result.outputs, wanted.outputs, case)
        if not words and any(out.device != other for out in tensors(result.outputs)):
            words = "the result is on another device"
        if words:
            yield Fault(f"{bench.name} has no device guard: with its tensor on another device {words}", moved)
            return
