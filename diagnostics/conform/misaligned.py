"""Vector access on an address that is not aligned for it.

**What it means.** The same values one element further in memory give another result, an error or a crash.

**Why it matters.** A view such as ``x[1:]`` starts anywhere. On a GPU a 16-byte load from such an address is an illegal
instruction that ends the process.

Fails: ``reinterpret_cast<const float4*>(x)[i]``. Passes: the same behind a test of the address, with a scalar path.

**Remedies.** ``handle-unaligned``.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

import torch

from opgraft.diagnostics.conform.lab import vary
from opgraft.diagnostics.conform.lab.bench import Bench, Fault, NotApplicable, sentence
from opgraft.diagnostics.conform.lab.case import Case, describe

KIND = "misaligned"


def is_aligned(case: Case) -> bool:
    return all(t.layout != torch.strided or t.numel() == 0 or t.data_ptr() % 16 == 0 for t in case.tensors)


def trial(bench: Bench, case: Case) -> str:
    """What goes wrong one element further; ``""`` where nothing does."""
    aligned, shifted = bench.real(vary.dense(case)), bench.real(case)
    if not aligned.ok:
        return ""
    if not shifted.ok:
        return f"fails when a tensor does not start on a multiple of 16 bytes: {sentence(shifted.error)}"
    words = bench.differ(aligned, shifted, case)
    if words and bench.differ(aligned, bench.real(vary.dense(case)), case):
        return ""  # not repeatable: another check's subject
    return f"is wrong when a tensor does not start on a multiple of 16 bytes: {words}" if words else ""


def check(bench: Bench) -> Iterator[Fault]:
    tried = False
    for base in bench.cases:
        own = [base] if not is_aligned(base) and all(tensor.is_contiguous() for tensor in base.tensors) else []
        for case in bench.usable(chain(own, vary.offsets(vary.dense(base)))):
            tried = True
            words = trial(bench, case)
            if words:
                small = bench.shrink(case, lambda tried: bool(trial(bench, tried)))
                yield Fault(
                    f"{bench.name} {trial(bench, small) or words}",
                    small,
                    evidence=(f"called with {describe(small)}",),
                    severity="error" if not bench.recorded or case is base else "note",
                )
                return
    if not tried and not bench.recorded:
        raise NotApplicable("no argument could start elsewhere")
