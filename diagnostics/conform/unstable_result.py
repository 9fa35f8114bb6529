"""The same call gives another result.

**What it means.** Two calls with equal arguments differ: memory that was never written, random numbers that the schema
does not tell of, a first call that differs, or state kept between calls.

**Why it matters.** The compiler merges equal calls and computes a call again in the backward. Both are wrong then.

Fails::

    def noisy(x): return x + torch.rand(x.shape)

Passes, with the tag that says so::

    torch.library.custom_op("mylib::noisy", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))

**Remedies.** ``fix-kernel``, ``declare-effect``, ``pass-state``.
"""

from __future__ import annotations

from collections.abc import Iterator

from opgraft.diagnostics.conform.lab import compare
from opgraft.diagnostics.conform.lab.allocations import FILLING
from opgraft.diagnostics.conform.lab.bench import Bench, Fault, NotApplicable, Result
from opgraft.diagnostics.conform.lab.case import Case
from opgraft.diagnostics.conform.lab.tree import map_tensors, tensors
from opgraft.diagnostics.conform.lab.witness import TAILS

KIND = "unstable-result"
REPEATS = 3


def call(bench: Bench, case: Case, seed: int = 0, filled: bool = False) -> Result:
    """One call; with ``filled``, memory that the op allocates holds NaN (the largest integer) before it is written."""
    return bench.real(case, seed=seed, filling=FILLING if filled else None)


def overwritten(bench: Bench, case: Case) -> str:
    """Does a call with other values change the results of the call before? A buffer that is kept between calls does."""
    first = call(bench, case)
    before = [leaf.clone() for leaf in tensors(first.outputs)]
    half = map_tensors(lambda t: t.detach() * 0.5 if t.dtype.is_floating_point else t, (case.args, case.kwargs))
    second = call(bench, case.varied(case.change, f"{case.label} halved", *half))
    if not second.ok:
        return ""
    words = compare.disagree(tensors(first.outputs), before, 1)
    return (
        f"overwrites the result of the call before, which shares its memory with the new one: {words}" if words else ""
    )


def trial(bench: Bench, case: Case) -> tuple[str, tuple[str, ...]]:
    first = call(bench, case)
    if not first.ok:
        return "", ()
    atomic = bench.facts.tagged("nondeterministic_bitwise")
    terms = compare.terms_of(case.tensors)
    bound_terms = terms if atomic else 1
    for _ in range(REPEATS):
        words = compare.disagree(first.all, call(bench, case).all, bound_terms)
        if words:
            return f"gives another result for the same call: {words}", ("fix-kernel", "declare-effect", "pass-state")
    words = overwritten(bench, case)
    if words:
        return words, ("pass-state", "fix-kernel")
    if bench.facts.tagged("nondeterministic_seeded"):
        return "", ()
    words = compare.disagree(first.all, call(bench, case, seed=1).all, terms)
    if words:
        return f"draws random numbers and does not say so: {words}", ("declare-effect", "pass-state")
    words = compare.disagree(first.all, call(bench, case, filled=True).all, terms)
    if words:
        return f"returns memory that it never wrote: {words} when fresh memory holds NaN", ("fix-kernel",)
    return "", ()


def check(bench: Bench) -> Iterator[Fault]:
    if bench.facts.is_composite:
        raise NotApplicable("a composite op is made of others, which are asked themselves")
    for case in bench.usable(iter(bench.cases)):
        words, remedies = trial(bench, case)
        if words:
            small = bench.shrink(case, lambda tried: bool(trial(bench, tried)[0]))
            tail = (
                TAILS["unwritten"] if "never wrote" in words else TAILS["overwritten"] if "overwrites" in words else ""
            )
            yield Fault(f"{bench.name} {words}", small, remedies=remedies, tail=tail)
            return
