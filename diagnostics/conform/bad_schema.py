"""Types, names or tags in the schema that the compiler or export cannot carry.

**What it means.** The op takes or returns something that has no place in a traced graph (an object, a dict), carries
tags that contradict each other, claims a namespace that is taken, or allows a call that the kernel's own parameters
do not: torch leaves out a trailing argument that has its default in the schema.

**Why it matters.** The registration itself fails, or the first compile or export does.

Fails::

    @torch.library.custom_op("mylib::mix", mutates_args=())
    def mix(x: torch.Tensor, settings: dict[str, float]) -> torch.Tensor: ...

Passes::

    @torch.library.custom_op("mylib::mix", mutates_args=())
    def mix(x: torch.Tensor, keys: list[str], values: list[float]) -> torch.Tensor: ...

**Remedies.** ``fix-schema``, ``unique-namespace``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from opgraft.diagnostics.conform.lab.bench import Bench, Fault, sentence

KIND = "bad-schema"
LAYOUT_TAGS = ("flexible_layout", "needs_contiguous_strides", "needs_exact_strides", "needs_fixed_stride_order")
CARRIED = (
    "Tensor",
    "SymInt",
    "int",
    "float",
    "bool",
    "str",
    "Scalar",
    "number",
    "ScalarType",
    "Layout",
    "Device",
    "MemoryFormat",
    "Generator",
    "complex",
    "Storage",
    "Stream",
    "t",
    "Any",
)
# How Python refuses a call that does not fit the parameters of a function.
SIGNATURE = re.compile(r"\(\) (missing \d+ required|got an unexpected keyword|takes .* positional|got multiple)")


def _by_torch(error: BaseException) -> bool:
    """Was the call that this error refuses made by torch, and not by the kernel?"""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and "/torch/" in trace.tb_frame.f_code.co_filename


def misfit(bench: Bench) -> Fault | None:
    """A call that the schema allows and the kernel's own parameters do not: torch leaves out a trailing argument that
    has its default."""
    for case in bench.usable(iter(bench.cases)):
        error = bench.real(case).error
        if isinstance(error, TypeError) and SIGNATURE.search(str(error)) and _by_torch(error):
            return Fault(
                f"{bench.name}: the kernel cannot be called as the schema says: {sentence(error)}",
                case,
                evidence=(bench.facts.schema,),
                remedies=("fix-schema",),
            )
    return None


def check(bench: Bench) -> Iterator[Fault]:
    facts = bench.facts
    for argument in facts.arguments:
        base = argument.kind.split("[")[0].rstrip("?")
        if base not in CARRIED and not base.startswith("__torch__"):
            yield Fault(
                f"{bench.name} takes {argument.name} of type {argument.kind}, which a traced graph cannot carry",
                evidence=(facts.schema,),
                remedies=("fix-schema",),
                severity="warning",
            )
            return
    layouts = [name for name in LAYOUT_TAGS if facts.tagged(name)]
    if len(layouts) > 1 and "flexible_layout" in layouts:
        yield Fault(
            f"{bench.name} carries the tags {' and '.join(layouts)}, which contradict each other",
            evidence=(facts.schema,),
            remedies=("fix-schema",),
            severity="warning",
        )
        return
    fault = misfit(bench)
    if fault is not None:
        yield fault
