"""32-bit index arithmetic on a large tensor.

**What it means.** With elements more than 2^31 apart the op reads the wrong ones, or fails.

**Why it matters.** ``row * stride`` in ``int`` wraps around at 2,147,483,648 elements: 4 GiB of bfloat16.

Fails: ``int offset = row * stride``. Passes: ``int64_t offset = static_cast<int64_t>(row) * stride``.

**Remedies.** ``use-int64``.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator

import torch

from opgraft.diagnostics.conform.lab import vary
from opgraft.diagnostics.conform.lab.bench import Bench, Fault, NotApplicable, NotRun, out_of_memory, sentence
from opgraft.diagnostics.conform.lab.case import Case, describe
from opgraft.diagnostics.conform.lab.tree import is_plain, map_tensors
from opgraft.diagnostics.conform.layout_assumed import against_dense, reaches_far

KIND = "index-overflow"
# Rows so far apart that row 3 lies beyond 2^31 elements.
FAR_STRIDE = 2**30 - 2**20
MOST_BYTES = 20 << 30


def far(case: Case) -> Case | None:
    """The call with the first tensor's rows spread over more than 2^31 elements of memory that is mostly not there."""
    done = False

    def one(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal done
        if done or not is_plain(tensor) or tensor.dim() < 2 or tensor.shape[0] < 4:
            return tensor
        rows = tensor.detach()[:4]
        inner = rows.contiguous().stride()[1:]
        elements = 3 * FAR_STRIDE + rows[0].numel()
        if elements * tensor.element_size() > MOST_BYTES:
            return tensor
        if tensor.device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(tensor.device)
            if free < 3 * elements * tensor.element_size():
                return tensor
            storage = torch.empty(elements, dtype=tensor.dtype, device=tensor.device)
            view = storage.as_strided(rows.shape, (FAR_STRIDE, *inner))
            view.copy_(rows)
            done = True
            return view
        pages = mmap.mmap(-1, elements * tensor.element_size())
        view = torch.frombuffer(pages, dtype=tensor.dtype).as_strided(rows.shape, (FAR_STRIDE, *inner))
        view.copy_(rows)
        done = True
        return view

    small = vary.resized(case, case.tensors[0].shape[0], 4) if case.tensors and case.tensors[0].dim() else None
    start = small or case
    args, kwargs = map_tensors(one, (start.args, start.kwargs))
    return start.varied("far", "rows 2^30 elements apart", args, kwargs) if done else None


def apart(case: Case) -> Case | None:
    """The same call with the rows of the first tensor a few elements apart: what fails there is no overflow."""
    done = False

    def one(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal done
        if done or not is_plain(tensor) or tensor.dim() < 2:
            return tensor
        dense = tensor.detach().contiguous()
        wide = torch.zeros(dense.shape[0], dense[0].numel() + 8, dtype=dense.dtype, device=dense.device)
        view = wide[:, : dense[0].numel()]
        view.copy_(dense.flatten(1))
        done = True
        return wide.as_strided(dense.shape, (wide.stride(0), *dense.stride()[1:]))

    args, kwargs = map_tensors(one, (case.args, case.kwargs))
    return case.varied("layout", "rows a few elements apart", args, kwargs) if done else None


def trial(bench: Bench, case: Case) -> str:
    near = vary.dense(case)
    straight = bench.real(near)
    if not straight.ok:
        return ""
    wide = bench.real(case)
    if not wide.ok:
        if out_of_memory(wide.error):
            raise NotRun(f"it takes more memory than there is: {sentence(wide.error)}")
        return sentence(wide.error)
    return bench.disagree(straight.outputs, wide.outputs, case)


def check(bench: Bench) -> Iterator[Fault]:
    cases = [case for case in bench.cases if reaches_far(case)]
    if not cases and bench.recorded:
        raise NotApplicable("no tensor of the run reaches over 2^31")
    if not cases:
        made = far(bench.cases[0]) if bench.cases else None
        if made is None:
            raise NotApplicable("no argument has rows that could lie far apart")
        if not bench.thorough and max(t.element_size() for t in made.tensors) > 8:
            raise NotRun("needs too much address space")
        near = apart(made)
        if near is not None and not bench.real(near).ok:
            raise NotApplicable("the op takes contiguous tensors only")
        if near is not None and against_dense(bench, near):
            raise NotApplicable("the op is wrong on any view with rows apart, far or near")
        cases = [made]
    for case in bench.usable(iter(cases)):
        words = trial(bench, case)
        if words:
            yield Fault(
                f"{bench.name} is wrong where elements lie over 2^31 apart: {words}",
                case,
                evidence=(f"called with {describe(case)}", "the same values close together: right"),
            )
            return
