"""An output size that depends on data.

**What it means.** The fake cannot know the size of a result, and takes a new symbol for it.

**Why it matters.** By default the graph breaks at the call; captured, the size is a symbol about which nothing is
known, which CUDA graphs and many later ops cannot take.

Fails: ``return x[x > 0]``. Passes: ``return x.clamp(min=0), (x > 0).sum()``, a result of the largest size with a count.

**Remedies.** ``use-upper-bound``, ``capture-dynamic-size``; ``read-shape`` where the number follows from shapes alone;
``declare-dynamic-size`` where the fake lies about it.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from opgraft.diagnostics.conform.lab.bench import Bench, Fault
from opgraft.diagnostics.conform.lab.case import Case
from opgraft.diagnostics.conform.lab.fakes import Promise
from opgraft.diagnostics.conform.lab.tree import leaves, map_tensors

KIND = "data-dependent-shape"


def _form(bench: Bench, case: Case) -> list[object] | None:
    """Shapes of the results, and the results that are numbers."""
    result = bench.real(case)
    if not result.ok:
        return None
    return [tuple(leaf.shape) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves(result.outputs)]


def _other_values(case: Case, seed: int) -> Case:
    generator = torch.Generator().manual_seed(seed)

    def one(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype.is_floating_point:
            scale = float(tensor.detach().abs().max()) if tensor.numel() else 1.0
            return (torch.randn(tensor.shape, generator=generator) * scale).to(tensor)
        if tensor.dtype == torch.bool:
            return (torch.rand(tensor.shape, generator=generator) > 0.5).to(tensor.device)
        return (
            tensor.detach()
            .flatten()[torch.randint(0, max(tensor.numel(), 1), (tensor.numel(),), generator=generator)]
            .view(tensor.shape)
        )

    args, kwargs = map_tensors(one, (case.args, case.kwargs))
    return case.varied("values", f"other values {seed}", args, kwargs)


def depends_on_data(bench: Bench, case: Case) -> bool:
    """Do the sizes change with the values, at the same shapes?"""
    forms = [form for seed in range(6) if (form := _form(bench, _other_values(case, seed))) is not None]
    first = _form(bench, case)
    return any(form != first for form in forms)


def check(bench: Bench) -> Iterator[Fault]:
    for case in bench.usable(iter(bench.cases)):
        fake = bench.fake(case)
        unknown = any(
            (isinstance(said, Promise) and None in said.shape) or isinstance(said, torch.SymInt)
            for said in fake.promises
        )
        refused = fake.error is not None and "DynamicOutputShape" in type(fake.error).__name__
        if not unknown and not refused:
            if bench.recorded or fake.error is not None or not depends_on_data(bench, case):
                continue
            yield Fault(
                f"{bench.name}: the size of a result depends on data, and the fake gives a fixed one",
                case,
                remedies=("declare-dynamic-size", "use-upper-bound"),
            )
            return
        steady = not depends_on_data(bench, case)
        known = ("read-shape",) if steady else ()
        words = "follows from the shapes alone" if steady else "depends on data"
        yield Fault(
            f"{bench.name}: the size of a result {words}, and the compiler has to take it for unknown",
            case,
            remedies=(*known, "use-upper-bound", "capture-dynamic-size"),
            severity="warning" if "compile" in bench.met else "note",
        )
        return
