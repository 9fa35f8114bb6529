"""Random calls of the ops over rows against float64: shapes, strides, dtypes, options, gradients. Run by hand.

python tests/ops/random_rows.py [--cases 10000] [--device cuda] [--seed 0] [--processes 1] [--seconds S] [OP ...]

A result may err by twice what the reference errs in the same dtype plus a few roundings of the size of what was added
up. Codes of fp8 ops are compared with the stated rule (row_rule.py) bit for bit. Prints one line an op, and exits 1 on
a wrong value.

Values are drawn and judged on the device, and the verdicts read many at a time: waiting for the device after every
comparison, and float64 numbers drawn on the CPU, took most of the time of a case.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import row_rule
import torch

import opgraft
from opgraft.ops import add_rms_norm, rms_norm

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
MANY_ELEMENTS = 12_000_000
VERDICTS = 64  # read at once
WIDTHS = (1, 2, 8, 33, 64, 100, 128, 256, 500, 512, 1000, 1024, 2048, 4096, 5120, 8192, 16384, 20000, 32768, 65536)


def drawn(generator: torch.Generator, dtype: torch.dtype, *sizes: int, scale: float = 1.0) -> torch.Tensor:
    values = torch.randn(sizes, generator=generator, dtype=torch.float64, device=generator.device)
    return (values * scale).to(dtype)


def rows(choice: random.Random, length: int, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Rows: dense, every second row, every second element, shifted, transposed or repeated. A few of them; on a GPU now
    and then as many as keep it busy for more than one round."""
    count = choice.randint(1, max(1, min(40, 60000 // length)))
    if generator.device.type == "cuda" and length >= 256 and choice.random() < 0.03:
        count = MANY_ELEMENTS // length
    form = choice.choice(["dense", "dense", "rows", "elements", "shifted", "transposed", "repeated"])
    scale = choice.choice([1.0, 1.0, 1e-3, 30.0])
    if form == "rows":
        return drawn(generator, dtype, 2 * count, length, scale=scale)[::2]
    if form == "elements":
        return drawn(generator, dtype, count, 2 * length, scale=scale)[:, ::2]
    if form == "shifted":
        return drawn(generator, dtype, count * length + 1, scale=scale)[1:].view(count, length)
    if form == "transposed":
        return drawn(generator, dtype, length, count, scale=scale).t()
    if form == "repeated":
        return drawn(generator, dtype, 1, length, scale=scale).expand(count, length)
    return drawn(generator, dtype, count, length, scale=scale)


def near(found: torch.Tensor, own: torch.Tensor, exact: torch.Tensor, size: torch.Tensor) -> torch.Tensor:
    """size: the largest of the terms that an element is made of, for its roundings."""
    finite = exact.isfinite()
    kinds = torch.finfo(found.dtype)
    exact = exact.clamp(-kinds.max, kinds.max)
    error, theirs = ((t.double() - exact).abs().where(finite, 0.0) for t in (found, own))
    rounding = kinds.eps * (32 if found.dtype == torch.float64 else 4)
    allowed = 2 * theirs.max() + rounding * size.where(finite, 0.0) + kinds.tiny
    return (error <= allowed).all()


def equal(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return (one == other).all() if one.shape == other.shape else torch.zeros((), dtype=torch.bool, device=one.device)


def norm_case(choice: random.Random, generator: torch.Generator, add: bool) -> torch.Tensor:
    dtype = choice.choice(DTYPES)
    length = choice.choice(WIDTHS)
    x = rows(choice, length, dtype, generator)
    extra = [drawn(generator, dtype, *x.shape)] if add else []
    kind = choice.choice((dtype, torch.promote_types(dtype, torch.float32)))
    weight = drawn(generator, kind, length) if choice.random() < 0.8 else None
    more = (choice.choice([1e-6, 1e-5, 0.1]), choice.choice([0.0, 1.0]), choice.random() < 0.5)
    module, op = (add_rms_norm, opgraft.add_rms_norm) if add else (rms_norm, opgraft.rms_norm)
    grads = [drawn(generator, dtype, *x.shape) for _ in range(1 + add)]

    # The sum is rounded to the dtype by what the op means: exact is what follows from the rounded sum.
    rows_in = [(x + extra[0]).double(), torch.zeros_like(x, dtype=torch.float64)] if add else [x.double()]

    def step(function: Any, wide: bool) -> list[torch.Tensor]:
        cast = (lambda t: t.double()) if wide else (lambda t: t)
        given = [t.detach().requires_grad_() for t in (rows_in if wide else (x, *extra))]
        own = None if weight is None else cast(weight).detach().requires_grad_()
        out = function(*given, own, *more)
        outputs = out if isinstance(out, tuple) else (out,)
        wanted = [*given, *([] if own is None else [own])]
        return [*outputs, *torch.autograd.grad(outputs, wanted, [cast(g) for g in grads])]

    found, own, exact = step(op, False), step(module.reference, False), step(module.reference, True)
    summed = rows_in[0]
    root = torch.rsqrt(summed.square().mean(-1, keepdim=True) + more[0])
    factor = torch.ones((), device=x.device) if weight is None else weight.double().abs() + more[1]
    normal = (summed * root).abs()
    pull = (grads[0].double().abs() * factor * normal).mean(-1, keepdim=True)
    x_size = (grads[0].double().abs() * factor + normal * pull) * root + (grads[1].double().abs() if add else 0)
    sizes = [normal * factor, *([summed.abs()] if add else []), *[x_size] * (1 + add)]
    if weight is not None:
        sizes.append((grads[0].double().abs() * normal).sum(0))
    return torch.stack([near(*parts) for parts in zip(found, own, exact, sizes, strict=True)]).all()


def fp8_case(choice: random.Random, generator: torch.Generator, name: str) -> torch.Tensor:
    dtype = choice.choice(DTYPES[:3])
    length = choice.choice(WIDTHS)
    x = rows(choice, length, dtype, generator)
    other = drawn(generator, dtype, *x.shape)
    options = (choice.choice([0, 128]), choice.choice([None, 0.01, 1e-4]), choice.random() < 0.5)
    right = []
    if name == "silu_mul_fp8":
        found = opgraft.silu_mul_fp8(x, other, *options)
        values = row_rule.silu_product(x, other)
    else:
        kind = choice.choice((dtype, torch.float32))
        weight = drawn(generator, kind, length) if choice.random() < 0.8 else None
        more = (choice.choice([1e-6, 0.1]), choice.choice([0.0, 1.0]), choice.random() < 0.5)
        if name == "rms_norm_fp8":
            found, normed = opgraft.rms_norm_fp8(x, weight, *more, *options), x
        else:
            *found, normed = opgraft.add_rms_norm_fp8(x, other, weight, *more, *options)
            right.append(equal(normed, x + other))
        values = row_rule.normalised(normed, weight, *more)
    codes, scales = row_rule.encode(values, *options)
    right += [equal(found[0].view(torch.uint8), codes), equal(found[1], scales)]
    return torch.stack(right).all()


def run_part(name: str, device_name: str, cases: range, seed: int, seconds: float) -> tuple[int, list[int]]:
    """How many of ``cases`` there was time for, and which were wrong."""
    device, started = torch.device(device_name), time.monotonic()
    torch.set_num_threads(1)
    wrong: list[int] = []
    waiting: dict[int, torch.Tensor] = {}

    def read() -> None:
        if waiting:
            verdicts = torch.stack(list(waiting.values())).tolist()
            wrong.extend(case for case, right in zip(waiting, verdicts, strict=True) if not right)
            waiting.clear()

    for done, case in enumerate(cases):
        if time.monotonic() - started > seconds:
            read()
            return done, wrong
        choice = random.Random(f"{seed} {name} {case}")
        generator = torch.Generator(device).manual_seed(seed * 1_000_003 + case)
        if "fp8" in name:
            waiting[case] = fp8_case(choice, generator, name)
        else:
            waiting[case] = norm_case(choice, generator, name == "add_rms_norm")
        if len(waiting) == VERDICTS:
            read()
    read()
    return len(cases), wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = ["rms_norm", "add_rms_norm", "rms_norm_fp8", "add_rms_norm_fp8", "silu_mul_fp8"]
    parser.add_argument("ops", nargs="*", default=names)
    parser.add_argument("--cases", type=int, default=10000)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=3600.0, help="an op, at most")
    given = parser.parse_args()
    failed = 0
    with ProcessPoolExecutor(given.processes, mp_context=get_context("spawn")) as pool:
        for name in given.ops:
            parts = [range(first, given.cases, given.processes) for first in range(given.processes)]
            jobs = [pool.submit(run_part, name, given.device, part, given.seed, given.seconds) for part in parts]
            done = sum(job.result()[0] for job in jobs)
            wrong = sorted(case for job in jobs for case in job.result()[1])
            print(f"{name}: {done} cases, {len(wrong)} wrong {wrong[:8]}", flush=True)
            failed += len(wrong)
    return failed > 0


if __name__ == "__main__":
    sys.exit(main())
