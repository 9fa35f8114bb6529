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
from opgraft.diagnostics.conform.lab.memory import fresh_call

KIND = "fake-mismatch"
KINDS_OF = {
    "test_schema": "undeclared-mutation",
    "test_autograd_registration": "missing-autograd",
    "test_faketensor": "fake-mismatch",
    "test_aot_dispatch_dynamic": "compiler-bug",
}


def check(bench: Bench) -> Iterator[Fault]:
    if bench.facts.is_composite:
        raise NotApplicable("opcheck is for kernels")
    for case in bench.usable(iter(bench.cases[:2])):
        for name, kind in KINDS_OF.items():
            if kind == "missing-autograd" and (bench.facts.written or not bench.facts.has_autograd):
                continue
            args, kwargs = fresh_call(case, requires_grad=bench.facts.has_autograd and not bench.facts.written)
            bench.tell(case, doing="compile")
            said = torch.library.opcheck(
                bench.op, args, kwargs, test_utils=(name,), raise_exception=False, atol=1e-2, rtol=1e-2
            )
            answer = said.get(name)
            if answer not in ("SUCCESS", None):
                error = answer if isinstance(answer, BaseException) else None
                yield Fault(
                    f"{bench.name}: torch.library.opcheck's {name} fails: {sentence(error) if error else answer}",
                    case,
                    kind="output-alias" if error is not None and "alias" in str(error) else kind,
                    severity="warning",
                    tail="" if case.kwargs else f'torch.library.opcheck({{op}}, ({{args}},), test_utils="{name}")',
                )
