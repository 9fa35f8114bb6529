"""A real kernel registered as CompositeImplicitAutograd.

**What it means.** The registration promises that the op is made of torch ops alone. Its body calls a kernel that the
dispatcher does not see.

**Why it matters.** The compiler traces into the body and hands the kernel tensors without memory: the compile fails, or
the kernel's work is missing from the graph. The gradient is lost.

Fails: ``lib.impl("scale", kernel, "CompositeImplicitAutograd")``. Passes: ``lib.impl("scale", kernel, "CPU")``.

**Remedies.** ``register-per-backend``.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from opgraft.diagnostics.conform.lab.bench import Bench, Fault, NotApplicable, sentence
from opgraft.diagnostics.conform.lab.case import Case
from opgraft.diagnostics.conform.lab.memory import fresh_call
from opgraft.diagnostics.conform.lab.tree import leaves, tensors
from opgraft.diagnostics.conform.missing_fake import lacks_fake

KIND = "composite-kernel"
POINTER_WORDS = ("data pointer", "data_ptr", "storage", "doesn't have storage", "allocate")


def hidden_work(bench: Bench, case: Case) -> str:
    """What the trace of the body leaves out; ``""`` where it computes the same."""
    fake = bench.fake(case)
    if fake.error is not None and not lacks_fake(fake.error) and any(word in str(fake.error) for word in POINTER_WORDS):
        return sentence(fake.error)
    args, kwargs = fresh_call(case, requires_grad=False)
    flat = list(leaves((args, kwargs)))
    positions = [index for index, leaf in enumerate(flat) if isinstance(leaf, torch.Tensor)]

    def call(*given: torch.Tensor) -> list[torch.Tensor]:
        filled = iter(given)
        from opgraft.diagnostics.conform.lab.tree import map_tensors

        new_args, new_kwargs = map_tensors(lambda _: next(filled), (args, kwargs))
        return tensors(bench.op(*new_args, **new_kwargs))

    given = [flat[index] for index in positions]
    bench.tell(case, doing="compile")
    try:
        with torch.no_grad():
            graph = make_fx(call)(*given)
    except Exception as error:
        return sentence(error) if any(word in str(error) for word in POINTER_WORDS) else ""
    other = [t * 0.5 + 0.25 if t.dtype.is_floating_point else t for t in given]
    with torch.no_grad():
        straight, traced = call(*[t.clone() for t in other]), graph(*[t.clone() for t in other])
    words = bench.disagree(straight, traced, case)
    return f"the traced body computes something else: {words}" if words else ""


def check(bench: Bench) -> Iterator[Fault]:
    if not bench.facts.is_composite:
        raise NotApplicable("not registered as CompositeImplicitAutograd")
    for case in bench.usable(iter(bench.cases)):
        if not bench.real(case).ok:
            continue
        words = hidden_work(bench, case)
        if words:
            yield Fault(
                f"{bench.name} is a kernel, and registered as CompositeImplicitAutograd: {words}",
                case,
                evidence=(bench.facts.schema,),
            )
            return
