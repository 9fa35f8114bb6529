"""The op sees or returns other dtypes compiled, or under autocast, than in eager.

**What it means.** Inside an autocast region the op returns another dtype, or meets a mixture of dtypes that it refuses,
because it has no autocast rule.

**Why it matters.** Autocast is on while the compiler traces and off when the traced code runs: an op that reads its
state, or leaves casting to torch ops inside, returns one dtype in the trace and another in the run.

Fails: ``return x.to(torch.get_autocast_dtype("cpu"))``. Passes: ``op.register_autocast("cpu", torch.bfloat16)``.

**Remedies.** ``add-autocast-rule`` (torch 2.7 and newer).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from opgraft.diagnostics.conform.lab import vary
from opgraft.diagnostics.conform.lab.bench import Bench, Fault, NotApplicable, sentence
from opgraft.diagnostics.conform.lab.case import Case, describe
from opgraft.diagnostics.conform.lab.tree import tensors

KIND = "autocast"


def _dtypes(bench: Bench, case: Case) -> tuple[list[torch.dtype], BaseException | None]:
    result = bench.real(case)
    return [tensor.dtype for tensor in tensors(result.outputs)], result.error


def check(bench: Bench) -> Iterator[Fault]:
    device = bench.device.type
    if bench.facts.has(f"Autocast{device.upper()}"):
        raise NotApplicable("the op has an autocast rule")
    if bench.facts.is_composite:
        raise NotApplicable("the parts of a composite op have their own rules")
    cases = [case for case in bench.cases if case.autocast]
    if bench.recorded and not cases:
        raise NotApplicable("the run made no call under autocast")
    for base in bench.usable(iter(cases or bench.cases)):
        name = base.autocast or "bfloat16"
        inside, outside = replace(base, autocast=name), replace(base, autocast="")
        within, error = _dtypes(bench, inside)
        without, trouble = _dtypes(bench, outside)
        if error is None and trouble is None and within != without:
            yield Fault(
                f"{bench.name} returns {_words(within)} inside an autocast region and {_words(without)} outside of one",
                inside,
                evidence=(f"called with {describe(base)}",),
                severity="error" if base.autocast else "warning",
            )
            return
        if error is not None and base.autocast:
            cast = vary.recast(inside, getattr(torch, name))
            wide = vary.recast(inside, torch.float32)
            if any(other is not None and bench.real(other).ok for other in (cast, wide)):
                yield Fault(
                    f"{bench.name} refuses the mixture of dtypes that autocast hands it: {sentence(error)}",
                    inside,
                    evidence=(f"called with {describe(base)}",),
                )
                return


def _words(dtypes: list[torch.dtype]) -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
