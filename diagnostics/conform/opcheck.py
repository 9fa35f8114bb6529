"""torch's own ``torch.library.opcheck`` fails where the checks here found nothing.

**What it means.** One of opcheck's utilities (schema, autograd registration, fake tensor, AOT dispatch with dynamic
shapes) reports a fault on one of the inputs.

**Why it matters.** The op does not keep what torch asks of every custom op.

Fails and passes as the other pages say; this check is the second opinion.

**Remedies.** ``fix-fake`` or what the message says.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from opgraft.diagnostics.conform.lab.bench import Bench, Fault, NotApplicable, sentence
from opgraft.diagnostics.conform.lab.case import Case
from opgraft.diagnostics.conform.lab.memory import fresh_call
from opgraft.diagnostics.conform.lab.tree import leaves, tensors
from opgraft.diagnostics.conform.missing_fake import lacks_fake

KIND = "fake-mismatch"
AOT = "test_aot_dispatch_dynamic"
KINDS_OF = {
    "test_schema": "undeclared-mutation",
    "test_autograd_registration": "missing-autograd",
    "test_faketensor": "fake-mismatch",
    AOT: "compiler-bug",
}

TOLERANCE = 1e-2
# What opcheck says of an argument that its own schema check does not know; nothing about the op.
BLIND = ("Cannot inspect value of type", "is not implemented for __torch__", "Tensor that doesn't have storage")


def comparable(bench: Bench, case: Case) -> bool:
    """Can opcheck sum and compare such results? Torch's 8-bit floats and objects it cannot, and blames the op."""
    outputs = bench.real(case).outputs
    if any(isinstance(leaf, torch.ScriptObject) for leaf in leaves(outputs)):
        return False
    for out in tensors(outputs):
        try:
            torch.testing.assert_close(out, out, atol=TOLERANCE, rtol=TOLERANCE, equal_nan=True)
            out.sum()
        except (AssertionError, NotImplementedError, RuntimeError, ValueError):
            return False
    return True


def _kind(error: BaseException | None, kind: str) -> str:
    if lacks_fake(error):
        return "missing-fake"  # in some namespaces of its own torch runs the kernel itself where sizes are known
    return "output-alias" if error is not None and "alias" in str(error) else kind


def check(bench: Bench) -> Iterator[Fault]:
    if bench.facts.is_composite:
        raise NotApplicable("opcheck is for kernels")
    for case in bench.usable(iter(bench.cases[:2])):
        bench.needs_fakes(case)
        compares = comparable(bench, case)
        for name, kind in KINDS_OF.items():
            if name == AOT and not compares:
                continue
            if kind == "missing-autograd" and (bench.facts.written or not bench.facts.has_autograd):
                continue
            args, kwargs = fresh_call(case, requires_grad=bench.facts.has_autograd and not bench.facts.written)
            bench.tell(case, doing="compile")
            said = torch.library.opcheck(
                bench.op, args, kwargs, test_utils=(name,), raise_exception=False, atol=TOLERANCE, rtol=TOLERANCE
            )
            answer = said.get(name)
            if answer not in ("SUCCESS", None):
                error = answer if isinstance(answer, BaseException) else None
                if error is not None and any(words in str(error) for words in BLIND):
                    continue
                yield Fault(
                    f"{bench.name}: torch.library.opcheck's {name} fails: {sentence(error) if error else answer}",
                    case,
                    kind=_kind(error, kind),
                    severity="warning",
                    tail="" if case.kwargs else f'torch.library.opcheck({{op}}, ({{args}},), test_utils="{name}")',
                )
