"""Types, names or tags in the schema that the compiler or export cannot carry.

**What it means.** The op takes or returns something that has no place in a traced graph (an object, a dict), carries
tags that contradict each other, or claims a namespace that is taken.

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

from collections.abc import Iterator

from opgraft.diagnostics.conform.lab.bench import Bench, Fault

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
