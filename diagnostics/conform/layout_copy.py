"""The compiler copies an input for the op's layout rule.

**What it means.** The layout tag of the op (by default the exact strides of eager) asks for a layout that the input
does not have in the compiled graph.

**Why it matters.** One read and one write of the input more, at every call.

Fails: an op without a tag behind a convolution, whose result is channels last when compiled. Passes: the same op with
``torch.Tag.flexible_layout``, where its kernel walks strides.

**Remedies.** ``set-layout-tag``, ``honour-strides``.
"""

from __future__ import annotations

from collections.abc import Iterator

from opgraft.diagnostics import _compat
from opgraft.diagnostics.conform.lab import vary
from opgraft.diagnostics.conform.lab.bench import Bench, Fault, NotApplicable
from opgraft.diagnostics.conform.lab.inductor import compiled

KIND = "layout-copy"


def check(bench: Bench) -> Iterator[Fault]:
    tag = _compat.layout_tag(bench.op)
    if tag == "flexible_layout":
        raise NotApplicable("the op takes any layout")
    if not bench.thorough and tag != "needs_contiguous_strides":
        raise NotApplicable(
            f"the rule {tag} asks for the layout of eager, which a copy is made for in larger graphs only"
        )
    for base in bench.cases[:1]:
        for case in bench.usable(iter(list(vary.layouts(base))[:1])):
            made = compiled(bench, case, "inductor", neighbours=True)
            if made.error is None and made.layout_copies:
                size = sum(tensor.numel() * tensor.element_size() for tensor in case.tensors)
                yield Fault(
                    f"{bench.name}: an input in another layout is copied for the rule {tag}, {size} bytes here",
                    case,
                    severity="note",
                )
                return
