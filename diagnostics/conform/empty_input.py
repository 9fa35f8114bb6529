"""Zero elements crash the kernel or launch an invalid grid.

**What it means.** A call with an empty tensor ends in an accident (a division by zero, an index error, an invalid
launch, a crash), not in an empty result and not in a clear refusal.

**Why it matters.** Empty batches happen: an expert without tokens, a last shard, a filter that keeps nothing.

Fails: ``blocks = (n + block - 1) / block`` with ``block = min(n, 256)``. Passes: ``if (n == 0) return out;`` before it.

**Remedies.** ``handle-empty``.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from opgraft.diagnostics.conform.lab import vary
from opgraft.diagnostics.conform.lab.bench import Bench, Fault, NotApplicable, refuses, sentence
from opgraft.diagnostics.conform.lab.case import Case, describe

KIND = "empty-input"


def is_empty(case: Case) -> bool:
    return any(tensor.numel() == 0 for tensor in case.tensors)


def check(bench: Bench) -> Iterator[Fault]:
    if not any(tensor.dim() for case in bench.cases for tensor in case.tensors):
        raise NotApplicable("no argument has an extent")
    for base in bench.cases:
        own = [base] if is_empty(base) else []
        for case in bench.usable(chain(own, vary.empties(base))):
            result = bench.real(case)
            if result.ok or (refuses(result.error, launch=False) and case is not base):
                continue
            if case is base and not _filled_works(bench, case):
                continue
            yield Fault(
                f"{bench.name} fails on an empty tensor: {sentence(result.error)}",
                case,
                evidence=(f"called with {describe(case)}",),
                severity="error" if not bench.recorded or case is base else "note",
            )
            return


def _filled_works(bench: Bench, case: Case) -> bool:
    """Does the op take the same call with elements in place of none?"""
    import torch

    from opgraft.diagnostics.conform.lab.tree import map_tensors

    def one(tensor: torch.Tensor) -> torch.Tensor:
        return torch.ones([size or 4 for size in tensor.shape], dtype=tensor.dtype, device=tensor.device)

    args, kwargs = map_tensors(lambda t: one(t) if t.numel() == 0 else t, (case.args, case.kwargs))
    return bench.real(case.varied("size", "with elements", args, kwargs)).ok
