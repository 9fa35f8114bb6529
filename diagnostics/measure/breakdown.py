"""Where the time of a step goes, by who wrote the kernel: the op, the compiler, or a library."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from opgraft.diagnostics.measure.profile import Profile, Record

# Host spans that enclose work and are none themselves.
_AROUND = (
    "Torch-Compiled Region",
    "TorchDynamo",
    "Pregraph",
    "AOTDispatcher",
    "CompiledFunction",
    "## Call",
    "autograd::",
    "torch::autograd",
    "Optimizer.",
    "ProfilerStep",
    "PyTorch Profiler",
)


@dataclass(frozen=True)
class Shares:
    """Microseconds and kernels a step, by sort."""

    generated_us: float
    op_us: float
    library_us: float
    span_us: float
    kernels: dict[str, float]

    @property
    def kernel_us(self) -> float:
        return self.generated_us + self.op_us + self.library_us


def sort_of(name: str, ops: frozenset[str], op_kernels: frozenset[str]) -> str:
    """ "op", "generated" or "library", from the name of a kernel or of a CPU operator."""
    if name in op_kernels or name in ops:
        return "op"
    if name.startswith(("triton_", "cpp_fused", "cpp_")):
        return "generated"
    return "library"


def outermost(records: Sequence[Record]) -> list[Record]:
    """CPU work: operators and generated kernels that no other of them encloses, on each thread."""
    kept: list[Record] = []
    end: dict[int, float] = {}
    for r in sorted(records, key=lambda r: (r.thread, r.start, -r.duration)):
        if r.name.startswith(_AROUND) or not ("::" in r.name or r.name.startswith("cpp_")):
            continue
        if r.start >= end.get(r.thread, float("-inf")):
            kept.append(r)
            end[r.thread] = r.end
    return kept


def shares(profile: Profile, ops: frozenset[str], op_kernels: frozenset[str]) -> Shares:
    """Sorts a profile's kernels (on a GPU) or outermost operators (on a CPU)."""
    device = profile.device()
    work = device or outermost(profile.host())
    times = {"generated": 0.0, "op": 0.0, "library": 0.0}
    kernels = dict.fromkeys(times, 0.0)
    for r in work:
        sort = sort_of(r.name, ops, op_kernels)
        times[sort] += r.duration / profile.steps
        kernels[sort] += 1 / profile.steps
    if device:
        span = (max(r.end for r in work) - min(r.start for r in work)) / profile.steps
    else:
        every = profile.host()
        span = (max(r.end for r in every) - min(r.start for r in every)) / profile.steps if every else 0.0
    return Shares(times["generated"], times["op"], times["library"], span, kernels)
