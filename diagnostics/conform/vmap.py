"""``torch.vmap`` over the op gives other values than a loop, or fails.

**What it means.** The op's vmap rule is wrong, or the op has none and torch's fallback cannot take it.

**Why it matters.** Per-sample gradients, ensembles and Jacobians run through vmap.

Fails: a rule that returns the batch dimension in another place than it says. Passes: a rule that is checked against a
loop. An op without a rule passes where torch's own loop serves.

**Remedies.** ``fix-kernel``: correct or add ``torch.library.register_vmap``.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from opgraft.diagnostics.conform.lab.bench import Bench, Fault, NotApplicable, NotRun, sentence
from opgraft.diagnostics.conform.lab.case import Case, called
from opgraft.diagnostics.conform.lab.memory import fresh_values
from opgraft.diagnostics.conform.lab.tree import tensors
from opgraft.diagnostics.conform.lab.witness import TAILS

KIND = "wrong-value"
BATCH = 3


def trial(bench: Bench, case: Case, ruled: bool) -> str:
    args = fresh_values(case)
    positions = [i for i, value in enumerate(args) if isinstance(value, torch.Tensor) and value.dtype.is_floating_point]
    if not positions:
        raise NotApplicable("no floating tensor among the arguments")
    scales = [1.0, 0.5, 0.25]
    rows = [[args[i] * scale for i in positions] for scale in scales]

    def call(*given: torch.Tensor) -> list[torch.Tensor]:
        filled = list(args)
        for position, value in zip(positions, given, strict=True):
            filled[position] = value
        return tensors(called(bench.op, case, filled))

    bench.tell(case, doing="compile")
    try:
        loop = [call(*row) for row in rows]
    except Exception as error:
        raise NotRun(f"the op refuses the values: {sentence(error)}") from error
    stacked = [torch.stack([row[i] for row in rows]) for i in range(len(positions))]
    torch.manual_seed(0)
    try:
        mapped = torch.vmap(call, randomness="same")(*stacked)
    except Exception as error:
        if not ruled:
            raise NotRun(f"the op has no vmap rule, and torch's fallback says: {sentence(error)}") from error
        return f"fails under torch.vmap: {sentence(error)}"
    wanted = [torch.stack([row[i] for row in loop]) for i in range(len(loop[0]))]
    words = bench.disagree(mapped, wanted, case)
    return f"gives other values under torch.vmap than in a loop: {words}" if words else ""


def check(bench: Bench) -> Iterator[Fault]:
    if bench.facts.written:
        raise NotApplicable("the op writes an argument")
    if bench.facts.tagged("nondeterministic_seeded"):
        raise NotApplicable("the op is random")
    ruled = bench.facts.has("FuncTorchBatched")
    for case in bench.usable(iter(bench.cases[:2])):
        words = trial(bench, case, ruled)
        if words:
            yield Fault(f"{bench.name} {words}", case, tail=TAILS["vmap"])
            return
