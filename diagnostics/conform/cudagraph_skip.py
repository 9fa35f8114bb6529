"""The op cannot be captured in a CUDA graph, or its replay is wrong.

**What it means.** The capture ends in an error, or a replay with new input gives the old numbers.

**Why it matters.** ``mode="reduce-overhead"`` skips or splits the graph around the op, or replays wrong results.

Fails: an op that waits for the device, allocates with cudaMalloc, or computes on the host. Passes: launches alone.

**Remedies.** ``keep-on-device``; ``make-functional`` where a written input is the reason; ``leave-it``.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from opgraft.diagnostics.conform.lab.bench import Bench, Fault, NotApplicable, sentence
from opgraft.diagnostics.conform.lab.case import Case
from opgraft.diagnostics.conform.lab.memory import fresh_call
from opgraft.diagnostics.conform.lab.tree import map_tensors, tensors
from opgraft.diagnostics.conform.wrong_stream import needs_gpu

KIND = "cudagraph-skip"


def trial(bench: Bench, case: Case) -> str:
    if not bench.real(case).ok:
        return ""
    args, kwargs = fresh_call(case, requires_grad=False)
    values = [tensor.clone() for tensor in tensors((args, kwargs))]
    with torch.no_grad():
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            for _ in range(2):
                bench.op(*map_tensors(torch.clone, args), **map_tensors(torch.clone, kwargs))
        torch.cuda.synchronize()
        bench.tell(case)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                outputs = bench.op(*args, **kwargs)
        except RuntimeError as error:
            return f"cannot be captured in a CUDA graph: {sentence(error)}"
        for tensor, value in zip(tensors((args, kwargs)), values, strict=True):
            tensor.copy_(value * 0.5 if value.dtype.is_floating_point else value)
        graph.replay()
        torch.cuda.synchronize()
        found = [tensor.clone() for tensor in tensors(outputs)]
        halved = map_tensors(lambda t: t.detach() * 0.5 if t.dtype.is_floating_point else t, (case.args, case.kwargs))
        wanted = bench.real(case.varied(case.change, f"{case.label} halved", *halved))
    words = bench.disagree(found, tensors(wanted.outputs), case) if wanted.ok else ""
    return f"replays wrong results from a CUDA graph: {words}" if words else ""


def check(bench: Bench) -> Iterator[Fault]:
    needs_gpu(bench)
    if bench.facts.written:
        raise NotApplicable("the op writes an argument")
    if bench.facts.tagged("cudagraph_unsafe"):
        raise NotApplicable("the op says that it is not for CUDA graphs")
    for case in bench.usable(iter(bench.cases[:2])):
        words = trial(bench, case)
        if words:
            remedies = ("keep-on-device", "leave-it")
            yield Fault(
                f"{bench.name} {words}", case, remedies=remedies, severity="warning" if "cannot" in words else "error"
            )
            return
