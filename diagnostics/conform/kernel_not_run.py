"""The kernel does not run in the compiled model.

**What it means.** Compiled code gives the right numbers without a call of the op: a decomposition, a lowering or a pass
stands in its place. (In ``opgraft compare``: no run of the op was seen in the arm that is named after it.)

**Why it matters.** What is measured, trusted or paid for is not this kernel. The op's speed, its rounding and its
device checks are those of something else.

Fails, with this beside the op::

    @torch._inductor.decomposition.register_decomposition(torch.ops.mylib.double.default)
    def _(x): return x * 2

Passes: the op without it, or called inside the compiled region where it was left out.

**Remedies.** ``fix-dispatch``: register the kernel under the device's own key and take the op out of decomposition
tables; call it inside the compiled region.
"""

from __future__ import annotations

from collections.abc import Iterator

from opgraft.diagnostics.conform.lab.bench import Bench, Fault, NotApplicable, NotRun
from opgraft.diagnostics.conform.lab.inductor import compiled
from opgraft.diagnostics.conform.lab.tree import tensors

KIND = "kernel-not-run"
TAIL = """\
function = torch.compile(lambda {names}: {call}, fullgraph=True)
function({names})
calls = []
kernel = {op}._op
{op}._op = lambda *args, **kwargs: calls.append(1) or kernel(*args, **kwargs)
function({names})
assert calls, "the compiled code does not call the op\""""


def check(bench: Bench) -> Iterator[Fault]:
    if bench.facts.is_composite:
        raise NotApplicable("a composite op is taken apart by the compiler")
    if not bench.facts.returns:
        raise NotApplicable("the op has no result")
    for case in bench.usable(iter(bench.cases[:1])):
        made = compiled(bench, case, "inductor", neighbours=True)
        if made.error is not None:
            raise NotRun("the op could not be compiled")
        if made.calls is None:
            raise NotRun("this torch does not show the calls of an op")
        if not tensors(made.wanted[: made.results]) or made.calls:
            return
        yield Fault(
            f"{bench.name} is not called by the compiled code: something else stands in its place",
            case,
            severity="warning",
            tail=TAIL,
        )
