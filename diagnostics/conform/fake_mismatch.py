"""The fake and the kernel disagree.

**What it means.** The fake promises a shape, stride, dtype, device, number of results or freshness of memory that the
kernel does not keep, or it raises where the kernel does not.

**Why it matters.** The compiler plans memory and writes code from the promise. A false one is a wrong result, memory
read outside a tensor, or an ``assert_size_stride`` in generated code that names nobody.

Fails, for a kernel that returns a contiguous tensor whatever it is given::

    double.register_fake(lambda x: torch.empty_like(x))      # keeps a permuted layout

Passes::

    double.register_fake(lambda x: x.new_empty(x.shape))

**Remedies.** ``fix-fake``. Strides of CPU tensors are looked at by ``torch.library.opcheck`` from torch 2.13 on only;
this check looks at them on every version.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch

from opgraft.diagnostics.conform.lab import vary
from opgraft.diagnostics.conform.lab.allocations import GUARD_BYTES
from opgraft.diagnostics.conform.lab.bench import Bench, Fault, Result, sentence
from opgraft.diagnostics.conform.lab.case import Case, describe
from opgraft.diagnostics.conform.lab.fakes import FakeResult, Promise, promise
from opgraft.diagnostics.conform.lab.tree import leaves, tensors
from opgraft.diagnostics.conform.missing_fake import lacks_fake, with_fake

KIND = "fake-mismatch"


def _significant(shape: tuple[int | None, ...], stride: tuple[int | None, ...]) -> tuple[int | None, ...]:
    """Strides that matter: those of dimensions with more than one element, of a tensor with any."""
    if 0 in shape:
        return ()
    return tuple(step if size != 1 else None for size, step in zip(shape, stride, strict=False))


def _against(fake: Promise, real: Promise, index: str) -> str:
    if len(fake.shape) != len(real.shape):
        return f"{index} has {len(real.shape)} dimensions, the fake says {len(fake.shape)}"
    unknown = [size is None for size in fake.shape]
    if any(not skip and a != b for skip, a, b in zip(unknown, fake.shape, real.shape, strict=True)):
        return f"{index} has shape {real.shape}, the fake says {fake.shape}"
    if fake.dtype != real.dtype:
        return f"{index} has dtype {real.dtype}, the fake says {fake.dtype}"
    if fake.device != real.device:
        return f"{index} is on {real.device}, the fake says {fake.device}"
    if fake.layout != real.layout:
        return f"{index} has layout {real.layout}, the fake says {fake.layout}"
    if not any(unknown) and _significant(fake.shape, fake.stride) != _significant(real.shape, real.stride):
        return f"{index} has strides {real.stride}, the fake says {fake.stride}"
    guarded = real.offset is not None and real.offset * real.dtype.itemsize == GUARD_BYTES  # kept from a guarded call
    fresh = real.same_as is None and fake.same_as is None
    if fake.offset is not None and fresh and fake.offset != real.offset and not guarded:
        return f"{index} starts at offset {real.offset} of its storage, the fake says {fake.offset}"
    if fake.same_as is not None and real.same_as is None:
        return f"{index} is a fresh tensor, the fake returns the memory of argument {fake.same_as}"
    return ""


def mismatch(fake: FakeResult, real: Result) -> str:
    """The first thing in which fake and kernel differ, as a sentence; ``""`` where they agree."""
    given = tensors((real.args, real.kwargs))
    outputs: list[Any] = list(leaves(real.outputs))
    promised = list(fake.promises)
    if len(promised) != len(outputs):
        return f"the kernel returns {len(outputs)} results, the fake {len(promised)}"
    for number, (said, out) in enumerate(zip(promised, outputs, strict=True)):
        index = f"result {number}" if len(outputs) > 1 else "the result"
        if isinstance(said, Promise) != isinstance(out, torch.Tensor):
            return f"{index} is a {type(out).__name__}, the fake says {type(said).__name__}"
        if isinstance(out, torch.Tensor):
            words = _against(said, promise(out, given), index)
            if words:
                return words
    return ""


def trial(bench: Bench, case: Case) -> tuple[str, tuple[str, ...]]:
    """What is wrong with the fake for this call, and the evidence."""
    real = bench.real(case)
    if not real.ok:
        return "", ()
    fake = bench.fake(case)
    if fake.error is not None:
        if lacks_fake(fake.error):
            return "", ()
        if "dynamic" in type(fake.error).__name__.lower():
            return "", ()
        return f"the fake raises where the kernel does not: {sentence(fake.error)}", ()
    return mismatch(fake, real), ()


def check(bench: Bench) -> Iterator[Fault]:
    with_fake(bench)
    seen: set[str] = set()
    for base in bench.cases:
        others: Iterator[Case] = iter(())
        if not bench.recorded:
            others = chain(vary.layouts(base), vary.sizes(base), vary.offsets(base), vary.empties(base))
        elif not bench.facts.written:
            others = vary.layouts(base)
        for case in bench.usable(chain((base,), others)):
            words, evidence = trial(bench, case)
            subject = words.partition(" has ")[2][:5]
            if not words or subject in seen:
                continue
            seen.add(subject)
            small = bench.shrink(case, lambda tried: bool(trial(bench, tried)[0]))
            words = trial(bench, small)[0] or words
            # What the run itself did not meet is a hazard.
            hazard = bench.recorded and case is not base
            yield Fault(
                f"{bench.name}: {words}",
                small,
                evidence=(f"called with {describe(small)}", *evidence),
                severity="note" if hazard else "error",
            )
            return
