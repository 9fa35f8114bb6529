"""No device guard, or a result on another device.

**What it means.** With a tensor on another device than the current one the op fails, gives wrong numbers, returns its
result elsewhere, or leaves another device current than before.

**Why it matters.** The second GPU of a machine is the first one where it shows.

Fails: a launch without a guard. Passes: ``DeviceGuard guard(x.get_device_index());`` before it.

**Remedies.** ``add-device-guard``.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from functools import partial

import torch

from opgraft.diagnostics.conform.lab.bench import Bench, Fault, NotRun, Result, sentence
from opgraft.diagnostics.conform.lab.case import Case
from opgraft.diagnostics.conform.lab.memory import fresh_call
from opgraft.diagnostics.conform.lab.tree import map_tensors, tensors
from opgraft.diagnostics.conform.wrong_stream import SLEEP_CYCLES, needs_gpu

KIND = "wrong-device"


def current_context() -> int | None:
    """The driver's current context of this thread, None where the driver does not say."""
    handle = ctypes.c_void_p()
    try:
        if ctypes.CDLL("libcuda.so.1").cuCtxGetCurrent(ctypes.byref(handle)) != 0:
            return None
    except (OSError, AttributeError):
        return None
    return handle.value or 0


def in_a_fresh_thread(bench: Bench, case: Case) -> Result:
    """The call in a thread that has not touched the device yet: no context is current there, as in a backward."""
    found: list[Result] = []
    thread = threading.Thread(target=lambda: found.append(bench.real(case)))
    thread.start()
    thread.join()
    return found[0]


def on_one_device(bench: Bench, case: Case, wanted: Result) -> str:
    """What shows of a missing guard where there is only one device."""
    before = current_context()
    bench.real(case)
    if current_context() != before:
        return "leaves another CUDA context current than before the call"
    threaded = in_a_fresh_thread(bench, case)
    if not threaded.ok:
        return f"fails in a thread where no device is current yet: {sentence(threaded.error)}"
    words = bench.disagree(threaded.outputs, wanted.outputs, case)
    if words and bench.disagree(bench.real(case).outputs, wanted.outputs, case):
        return ""  # not repeatable here either: another check's subject
    return f"is wrong in a thread where no device is current yet: {words}" if words else ""


def out_of_order(bench: Bench, moved: Case, other: torch.device) -> str:
    """A kernel on the wrong device may read the right memory through a link between the two, but it does not wait for
    the work of the tensor's device: behind a long kernel there it reads the old values."""
    wanted = bench.real(moved)
    args, kwargs = fresh_call(moved, requires_grad=False)
    targets = [tensor for tensor in tensors((args, kwargs)) if tensor.dtype.is_floating_point]
    sources = [tensor.clone() for tensor in targets]
    for target in targets:
        target.zero_()
    torch.cuda.synchronize(other)
    bench.tell(moved)
    with torch.no_grad():
        with torch.cuda.device(other):
            torch.cuda._sleep(SLEEP_CYCLES)
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source, non_blocking=True)
        outputs = bench.op(*args, **kwargs)
        torch.cuda.synchronize()
        torch.cuda.synchronize(other)
    words = bench.disagree(tensors(outputs), tensors(wanted.outputs), moved)
    return f"it does not wait for the work on that device ({words})" if words else ""


def guarded_by_hand(bench: Bench, moved: Case, other: torch.device, wanted: Result) -> bool:
    """Whether the call is right with its tensors' device current."""
    with torch.cuda.device(other):
        result = bench.real(moved)
        torch.cuda.synchronize(other)
    return result.ok and not bench.disagree(result.outputs, wanted.outputs, moved)


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
        trouble = on_one_device(bench, case, wanted)
        if trouble:
            yield Fault(f"{bench.name} {trouble}", case)
            return
        if torch.cuda.device_count() < 2:
            raise NotRun("the machine has one GPU; there the op keeps the context, and works in a fresh thread")
        other = torch.device("cuda", 1 - current)
        args, kwargs = map_tensors(partial(torch.Tensor.to, device=other), (case.args, case.kwargs))
        moved = case.varied("device", f"on {other}, {torch.device('cuda', current)} current", args, kwargs)
        result = bench.real(moved)
        words = sentence(result.error) if not result.ok else bench.disagree(result.outputs, wanted.outputs, case)
        if not words and any(out.device != other for out in tensors(result.outputs)):
            words = "the result is on another device"
        if not words and torch.cuda.current_device() != current:
            words = "another device is current after the call"
        if not words:
            words = out_of_order(bench, moved, other)
        if words and not guarded_by_hand(bench, moved, other, wanted):
            words = ""  # with its device current it is off too: for another reason
        if words:
            yield Fault(f"{bench.name} has no device guard: with its tensor on another device {words}", moved)
            return
