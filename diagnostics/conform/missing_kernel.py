"""No kernel for this device or dtype, or the library that registers the op is not loaded.

**What it means.** The call ends in "Could not run", or the op does not exist (any more) when it is called.

**Why it matters.** A ``torch.library.Library`` takes its ops with it when it is collected; a process that loads a model
needs the library as much as the one that made it.

Fails::

    def register():
        lib = torch.library.Library("mylib", "DEF")     # collected when the function returns
        lib.define("double(Tensor x) -> Tensor")

Passes: the same with ``lib`` at module level.

**Remedies.** ``add-kernel``, ``load-library``, ``keep-library``.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from opgraft.diagnostics import _compat
from opgraft.diagnostics.conform.lab import vary
from opgraft.diagnostics.conform.lab.bench import Bench, Fault, sentence
from opgraft.diagnostics.conform.lab.case import Case, describe

KIND = "missing-kernel"
# Quantized, opaque, sparse and nested tensors have dispatch keys of their own.
FORMS = ("Quantized", "Mkldnn", "Sparse", "SparseCsr", "NestedTensor")
DISPATCH_WORDS = ("Could not run '", "There were no tensor arguments to this function", "no kernel")


def says_missing(error: BaseException | None, name: str) -> bool:
    """Does this error say that the dispatcher has no kernel of this op for these arguments?"""
    return isinstance(error, NotImplementedError) and f"'{name}'" in str(error) and DISPATCH_WORDS[0] in str(error)


def of_another_form(bench: Bench) -> bool:
    """Has the op a kernel for this device that takes tensors of another form, which no guess makes?"""
    return any(bench.facts.has(form + bench.device.type.upper()) for form in FORMS)


def in_dtype(bench: Bench, base: Case, dtype: torch.dtype) -> Case | None:
    """The call in another dtype: as the op's own samples have it (some tensors may keep theirs), else every floating
    tensor in it; None where that is the same call."""
    spec = bench.facts.spec
    if spec is not None and spec.samples is not None and base.origin == "sample":
        for sample in spec.samples(bench.device, dtype):
            if sample.name == base.name:
                found = base.varied("dtype", str(dtype).removeprefix("torch."), tuple(sample.args), dict(sample.kwargs))
                dtypes = [tensor.dtype for tensor in found.tensors]
                return None if dtypes == [tensor.dtype for tensor in base.tensors] else found
    return vary.recast(base, dtype)


def check(bench: Bench) -> Iterator[Fault]:
    if not _compat.is_registered(bench.name):
        yield Fault(
            f"{bench.name} is not registered any more: the Library object that defined it was collected",
            remedies=("keep-library", "load-library"),
        )
        return
    for case in bench.usable(iter(bench.cases)):
        result = bench.real(case)
        if says_missing(result.error, bench.name) and not (case.origin == "generated" and of_another_form(bench)):
            yield Fault(
                f"{bench.name} has no kernel for {bench.device.type} tensors: {sentence(result.error)}",
                case,
                evidence=(f"called with {describe(case)}",),
                remedies=("add-kernel", "load-library"),
                severity="error" if bench.recorded else "warning",
            )
            return
    if not bench.recorded and bench.device.type == "cpu":
        dtypes = bench.facts.spec.dtypes if bench.facts.spec is not None else ()
        for dtype in dtypes:
            for base in bench.usable(iter(bench.cases[:1])):
                case = in_dtype(bench, base, dtype) or base
                result = bench.real(case)
                if not result.ok and case is not base:
                    yield Fault(
                        f"{bench.name} is described to take {dtype} and refuses it: {sentence(result.error)}",
                        case,
                        remedies=("add-kernel",),
                    )
                    return
