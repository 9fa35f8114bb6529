"""The op conforms, and the compiled result is wrong, or the compiler fails.

**What it means.** Eager and compiled results, strides or gradients differ by more than rounding, at the size that was
compiled or at another one, or the compile ends in an error, though fake, schema and kernel agree.

**Why it matters.** Nothing in the kernel can mend it; knowing that saves the search.

Fails: an op with a lowering of its own that computes something else. Passes: the op without it.

**Remedies.** ``update-torch``, ``work-around``. A fault that ``aot_eager`` shows too lies in functionalisation or in
the op; one that only Inductor shows lies in its code.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch

from opgraft.diagnostics._compat import planned_overload
from opgraft.diagnostics.conform.lab import compare
from opgraft.diagnostics.conform.lab.bench import Bench, Fault, NotApplicable, sentence
from opgraft.diagnostics.conform.lab.case import Case
from opgraft.diagnostics.conform.lab.inductor import Compiled, compiled, compiled_gradients, other_size
from opgraft.diagnostics.conform.lab.settle import GRADIENTS_OFF
from opgraft.diagnostics.conform.missing_autograd import requiring
from opgraft.diagnostics.conform.missing_fake import lacks_fake

KIND = "compiler-bug"
# Up to so many times the bound for rounding, a difference is put down to fusion that rounds elsewhere.
ROUNDING = 20
# A line of a compile error that begins with the type of one.
NAMED = re.compile(r"\w*(Error|Exception): ")
# What Dynamo says of the error that a call on fake tensors raised.
INNER = re.compile(r"got (\w*(?:Error|Exception))\((['\"])(.+?)(?:\\n|\2\))")
# torch's refusal of a kernel that wants numbers where sizes are symbols.
SYMBOLIC = "with symbolic sizes/strides"
# torch's refusal of an op whose schema says that a result is an argument.
ALIAS = "output has alias annotations"


def strides(made: Compiled) -> str:
    """In which result's strides the compiled code differs; Inductor makes those that the fake promises."""
    for index, (ours, theirs) in enumerate(zip(made.outputs[: made.results], made.wanted, strict=False)):
        if not isinstance(ours, torch.Tensor) or not isinstance(theirs, torch.Tensor) or 0 in ours.shape:
            continue
        matter = [dim for dim, size in enumerate(ours.shape) if size > 1]
        if ours.shape == theirs.shape and any(ours.stride(dim) != theirs.stride(dim) for dim in matter):
            return f"result {index} has strides {tuple(ours.stride())}, in eager {tuple(theirs.stride())}"
    return ""


def differs(bench: Bench, case: Case, found: Any, wanted: Any) -> tuple[str, str]:
    """What differs, and whether it is a fault (``compiler-bug``) or rounding (``precision``)."""
    words = bench.disagree(found, wanted, case)
    if not words:
        return "", ""
    far = compare.disagree(found, wanted, compare.terms_of(case.tensors) * ROUNDING**2)
    return words, KIND if far else "precision"


def _fault(bench: Bench, case: Case, backend: str, words: str, kind: str, what: str) -> Fault:
    where = "aot_eager shows it too" if backend == "aot_eager" else "aot_eager is right, so it lies in Inductor's code"
    return Fault(
        f"{bench.name} gives other {what} compiled with {backend}: {words}",
        case,
        kind=kind,
        evidence=(where,) if what == "gradients" else (where, *_seen(bench, backend)),
        severity="note" if kind == "precision" else "error",
        tail=TAIL.replace("BACKEND", backend) if what == "values" else "print({call})",
    )


def _seen(bench: Bench, backend: str) -> tuple[str, ...]:
    """What speaks for a fault that shows without gradients: that, and what Inductor calls where that is not the op."""
    overload = planned_overload(bench.op) if backend == "inductor" else None
    if overload is None:
        return (GRADIENTS_OFF,)
    words = f"Inductor calls {overload} in its place, for the tag torch.Tag.out; without the tag it calls the op"
    return GRADIENTS_OFF, words


def _cause(error: BaseException) -> str:
    """The line of a compile error that tells why: the first ones say which backend, and which call, it was."""
    inner = INNER.search(str(error))
    if inner is not None:
        return f"{inner[1]}: {inner[3][:200]}"
    named = [line.strip() for line in str(error).splitlines() if NAMED.match(line.strip())]
    return f"{type(error).__name__}: {named[-1][:200]}" if named else sentence(error)


TAIL = """\
function = torch.compile(lambda {names}: {call}, backend="BACKEND", fullgraph=True, dynamic=True)
torch.testing.assert_close(function({names}), {call})"""


def check(bench: Bench) -> Iterator[Fault]:
    for backend in ("aot_eager", "inductor"):
        for case in bench.usable(iter(bench.cases[:1])):
            bench.needs_fakes(case)
            made = compiled(bench, case, backend, neighbours=True)
            if made.error is not None:
                text = str(made.error)
                if lacks_fake(made.error):
                    raise NotApplicable("the op has no fake")
                if "DynamicOutputShape" in text or "data-dependent" in text.lower():
                    raise NotApplicable("a size that depends on data ends the graph")
                numbers = bench.facts.is_composite and SYMBOLIC in text
                yield Fault(
                    f"{bench.name} cannot be compiled with {backend}: {_cause(made.error)}",
                    case,
                    kind="output-alias" if ALIAS in text else "composite-kernel" if numbers else "",
                    evidence=_seen(bench, backend),
                    tail=TAIL.replace("BACKEND", backend),
                )
                return
            words, kind = differs(bench, case, made.outputs, made.wanted)
            if words:
                yield _fault(bench, case, backend, words, kind, "values")
                return
            words = strides(made)
            if words:
                yield _fault(bench, case, backend, words, "fake-mismatch", "strides")
                return
            asked = requiring(bench, case) if bench.facts.has_autograd and not bench.facts.written else None
            if asked is not None and (backend == "aot_eager" or bench.thorough):
                pair = compiled_gradients(bench, asked, backend)
                if pair is not None and pair.error is not None:
                    yield Fault(
                        f"{bench.name}: its gradient cannot be compiled with {backend}: {sentence(pair.error)}", asked
                    )
                    return
                words, kind = differs(bench, asked, pair.found, pair.wanted) if pair is not None else ("", "")
                if words:
                    yield _fault(bench, asked, backend, words, kind, "gradients")
                    return
            if bench.facts.tagged("nondeterministic_seeded") or (backend == "inductor" and not bench.thorough):
                continue
            other = other_size(bench, case, backend)
            if other is None:
                continue
            larger, pair = other
            if pair.error is not None:
                yield Fault(
                    f"{bench.name}, compiled with {backend} for any size, fails at another one: {sentence(pair.error)}",
                    larger,
                    evidence=_seen(bench, backend),
                )
                return
            words, kind = differs(bench, larger, pair.found, pair.wanted)
            if words:
                yield _fault(bench, larger, backend, words, kind, "values at another size")
                return
