"""Random calls of every op of the table against its reference in float64: shapes, strides, dtypes, options, states.

python tests/ops/random_cases.py [--device cuda] [--cases 10000] [--seconds 600] [--seed 0] [--processes 4] [OP ...]

Every case is made from (op, seed, number) alone, so `--only NUMBER` repeats a failure, and is the same on every device:
arguments and exact results are made on the CPU, by as many processes as are asked for. An op with its own drawing below
gets sizes of every kind; any other op of the table gets its samples with their values shuffled and their layouts
changed. A case fails where the op raises, or errs by more than twice what the reference errs in the same dtype, a few
roundings of the result, and what a rounding of the inputs does to the exact result.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any

import torch

import opgraft  # noqa: F401  (fills the table)
from opgraft.registry import OpSpec, Sample, find, specs

from exact import exact_function
from table import map_tensors, tensors, to_double, worst_error

ROUNDINGS = 16
MOST_ELEMENTS = 20_000  # of one tensor: the reference in float64 has to be quick
CONDITION_DRAWS = 4
JOB_CASES = 250  # of one op, by one process at a time
TOGETHER = 25  # of these, what goes to the device and comes back at once
MOST_FAILURES = 20  # after which an op is not tried any further
CPU = torch.device("cpu")


@dataclass
class Draw:
    """Random sizes, values and layouts of one case."""

    dtype: torch.dtype
    chance: random.Random
    generator: torch.Generator

    @classmethod
    def of(cls, dtype: torch.dtype, key: str) -> Draw:
        chance = random.Random(key)
        return cls(dtype, chance, torch.Generator().manual_seed(chance.getrandbits(60)))

    @property
    def wide(self) -> torch.dtype:
        """The type of states: float32, or float64 for float64."""
        return torch.promote_types(self.dtype, torch.float32)

    def flag(self, probability: float = 0.5) -> bool:
        return self.chance.random() < probability

    def size(self, most: int) -> int:
        """Small numbers, powers of two and their neighbours, and anything up to ``most``; now and then zero."""
        kind = self.chance.random()
        if kind < 0.03:
            return 0
        if kind < 0.4:
            return self.chance.randint(1, min(9, most))
        if kind < 0.7:
            power = 1 << self.chance.randint(0, max(0, most.bit_length() - 1))
            return min(max(1, power + self.chance.randint(-1, 1)), most)
        return self.chance.randint(1, most)

    def shape(self, *most: int) -> tuple[int, ...]:
        """Sizes up to ``most``, cut until their product is small enough."""
        sizes = [self.size(limit) for limit in most]
        while _product(sizes) > MOST_ELEMENTS:
            largest = max(range(len(sizes)), key=lambda i: sizes[i])
            sizes[largest] = sizes[largest] // 2
        return tuple(sizes)

    def values(self, shape: tuple[int, ...], low: float | None = None, high: float = 1.0) -> torch.Tensor:
        """Normally distributed of a random scale, or uniform between ``low`` and ``high``."""
        if low is None:
            scale = self.chance.choice((1e-3, 0.3, 1.0, 1.0, 1.0, 8.0))
            return torch.randn(shape, generator=self.generator, dtype=torch.float64) * scale
        return torch.rand(shape, generator=self.generator, dtype=torch.float64) * (high - low) + low

    def tensor(
        self, *shape: int, low: float | None = None, high: float = 1.0, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        drawn = self.values(shape, low, high).to(dtype or self.dtype)
        return self.layout(drawn)

    def layout(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same values (but where a dimension gets expanded) in another layout."""
        kind = self.chance.random()
        if tensor.dim() == 0 or not tensor.numel() or kind < 0.4:
            return tensor
        if kind < 0.6:
            order = list(range(tensor.dim()))
            self.chance.shuffle(order)
            back = [order.index(d) for d in range(tensor.dim())]
            return tensor.permute(order).contiguous().permute(back)
        if kind < 0.75:
            offset = self.chance.randint(1, 9)
            storage = tensor.new_empty(tensor.numel() + offset)
            view = storage[offset:].view(tensor.shape)
            return view.copy_(tensor)
        if kind < 0.9:
            dim = self.chance.randrange(tensor.dim())
            step, more = self.chance.randint(1, 3), self.chance.randint(0, 3)
            sizes = list(tensor.shape)
            sizes[dim] = sizes[dim] * step + more
            view = tensor.new_empty(sizes).narrow(dim, 0, tensor.shape[dim] * step)
            view = view[(slice(None),) * dim + (slice(None, None, step),)]
            return view.copy_(tensor)
        dim = self.chance.randrange(tensor.dim())
        return tensor.narrow(dim, 0, 1).expand(tensor.shape)


def _product(sizes: list[int]) -> int:
    total = 1
    for size in sizes:
        total *= max(size, 1)
    return total


def _elementwise(draw: Draw) -> tuple[Any, ...]:
    return (draw.tensor(*draw.shape(*draw.chance.choice(((4000,), (60, 200), (9, 9, 200))))),)


def _elementwise_backward(draw: Draw) -> tuple[Any, ...]:
    (x,) = _elementwise(draw)
    return draw.tensor(*x.shape), x


def _linear_scan(draw: Draw) -> tuple[Any, ...]:
    shape = draw.shape(*draw.chance.choice(((4000,), (40, 600), (5, 300, 40), (4, 5, 60, 9))))
    low, high = draw.chance.choice(((0.0, 1.0), (0.99, 1.0), (-1.0, 1.0), (0.0, 0.01), (1.0, 1.0)))
    dim = draw.chance.randrange(-len(shape), len(shape))
    initial = draw.tensor(*(s for d, s in enumerate(shape) if d != dim % len(shape))) if draw.flag() else None
    return draw.tensor(*shape, low=low, high=high), draw.tensor(*shape), initial, dim, draw.flag()


def _linear_scan_backward(draw: Draw) -> tuple[Any, ...]:
    decay, update, *rest = _linear_scan(draw)
    return draw.tensor(*decay.shape), decay, draw.layout(_result("linear_scan", decay, update, *rest)), *rest


def _causal_conv1d(draw: Draw) -> tuple[Any, ...]:
    batch, channels, length = draw.shape(4, 80, 1200)
    width, last = draw.chance.randint(1, 8) if draw.flag(0.3) else draw.chance.randint(2, 4), draw.flag()
    seq_idx = None
    if draw.flag(0.25):
        starts = torch.rand((batch, length), generator=draw.generator) < draw.chance.choice((0.02, 0.3))
        seq_idx = starts.cumsum(1).to(torch.int32)
        if draw.flag():
            seq_idx[:, length - length // 5 :] = -1
        seq_idx = draw.layout(seq_idx)
    return (
        draw.tensor(*((batch, length, channels) if last else (batch, channels, length))),
        draw.tensor(channels, width),
        draw.tensor(channels) if draw.flag() else None,
        draw.tensor(batch, channels, width - 1) if draw.flag() else None,
        seq_idx,
        draw.flag(0.7),
        last,
    )


def _causal_conv1d_backward(draw: Draw) -> tuple[Any, ...]:
    args = _causal_conv1d(draw)
    x, weight, last = args[0], args[1], args[-1]
    channels = x.shape[2 if last else 1]
    final = draw.tensor(x.shape[0], channels, weight.shape[1] - 1) if draw.flag() else None
    return draw.tensor(*x.shape), final, *args


def _causal_conv1d_update(draw: Draw) -> tuple[Any, ...]:
    batch, channels = draw.shape(30, 400)
    width = draw.chance.randint(1, 8)
    state = draw.tensor(batch, channels, width - 1 + draw.chance.choice((0, 0, 1, 4)))
    bias = draw.tensor(channels) if draw.flag() else None
    return draw.tensor(batch, channels), state, draw.tensor(channels, width), bias, draw.flag(0.7)


def _selective(
    draw: Draw, lead: tuple[int, ...], channels: int, time: tuple[int, ...], states: int, full: bool = False
) -> dict[str, Any]:
    """Arguments from u to softplus; `full`: with softplus and gate, as Mamba has them."""
    groups = draw.chance.choice([g for g in (1, 2, 3, 4) if channels % g == 0])
    matrix = (*lead, groups, states, *time)
    softplus = draw.flag(0.7) or full
    row = (*lead, channels, *time)
    decay = draw.chance.choice((1e-4, 1.0, 1.0, 10.0))
    given = {
        "u": draw.tensor(*row),
        "delta": draw.tensor(*row, low=-4.0, high=2.0) if softplus else draw.tensor(*row, low=0.0, high=0.5),
        "A": draw.tensor(channels, states, low=-2 * decay, high=-0.2 * decay, dtype=draw.wide),
        "B": draw.tensor(*matrix),
        "C": draw.tensor(*matrix),
        "D": draw.tensor(channels, dtype=draw.wide) if draw.flag() else None,
        "z": draw.tensor(*row) if draw.flag() or full else None,
        # Without softplus a negative step grows the state without bound.
        "delta_bias": draw.tensor(channels, low=-0.5 * softplus, high=0.5, dtype=draw.wide) if draw.flag() else None,
    }
    return {**given, "softplus": softplus}


def _states(draw: Draw) -> int:
    return draw.chance.choice((1, 2, 3, 4, 8, 15, 16, 16, 16, 17, 32, 40, 64, 100, 256))


def _selective_scan(draw: Draw) -> tuple[Any, ...]:
    states, full = _states(draw), False
    batch, channels, length = draw.shape(3, 40, 300)
    while batch * channels * length * states > 20 * MOST_ELEMENTS:
        length, channels = max(length // 2, 1), max(channels // 2, 1)
    if draw.flag(0.01):  # so many that a GPU walks time serially
        batch = draw.chance.randint(1, 3)
        channels, length = draw.chance.randint(16_000, 36_000) // batch, draw.chance.randint(30, 60)
        states = min(states, 8)
        if full := draw.flag():  # and moves whole vectors of rows
            length, states = draw.chance.randint(1, 18) * 8, draw.chance.choice((9, 15, 16, 16))
            channels = min(channels, 3_000_000 // (batch * length * 8) * 8)
    given = _selective(draw, (batch,), channels, (length,), states, full)
    state = draw.tensor(batch, channels, states, dtype=draw.wide) if draw.flag() else None
    return *given.values(), state


def _selective_scan_backward(draw: Draw) -> tuple[Any, ...]:
    args = _selective_scan(draw)
    u, decays = args[0], args[2]
    final = draw.tensor(u.shape[0], *decays.shape, dtype=draw.wide) if draw.flag() else None
    return draw.tensor(*u.shape), final, *args


def _selective_scan_update(draw: Draw) -> tuple[Any, ...]:
    states = _states(draw)
    batch, channels = draw.shape(8, 60)
    given = _selective(draw, (batch,), channels, (), states)
    return draw.tensor(batch, channels, states, dtype=draw.wide), *given.values()


DRAWINGS: dict[str, Callable[[Draw], tuple[Any, ...]]] = {
    "opgraft::gelu": _elementwise,
    "opgraft::gelu_backward": _elementwise_backward,
    "opgraft::linear_scan": _linear_scan,
    "opgraft::linear_scan_backward": _linear_scan_backward,
    "opgraft::causal_conv1d": _causal_conv1d,
    "opgraft::causal_conv1d_backward": _causal_conv1d_backward,
    "opgraft::causal_conv1d_update": _causal_conv1d_update,
    "opgraft::selective_scan": _selective_scan,
    "opgraft::selective_scan_backward": _selective_scan_backward,
    "opgraft::selective_scan_update": _selective_scan_update,
}


def _result(op: str, *args: Any) -> torch.Tensor:
    """What a backward op gets of the forward, from the reference, so that a faulty forward is not its fault too."""
    spec = find(f"opgraft::{op}")
    assert spec is not None
    out: torch.Tensor = spec.reference(*args)
    return out


def _from_samples(spec: OpSpec, draw: Draw) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """One of the op's samples, its floating values shuffled within each tensor, in other layouts."""
    assert spec.samples is not None, f"{spec.name} has no samples"
    sample: Sample = draw.chance.choice(list(spec.samples(CPU, draw.dtype)))

    def shuffled(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point() or not tensor.numel():
            return tensor
        order = torch.randperm(tensor.numel(), generator=draw.generator)
        return draw.layout(tensor.reshape(-1)[order].view(tensor.shape))

    return map_tensors(shuffled, sample.args), map_tensors(shuffled, sample.kwargs)


def condition(spec: OpSpec, args: Any, kwargs: Any, exact: list[torch.Tensor], draw: Draw) -> list[float]:
    """By how much each exact output moves when every input is off by a rounding of the type that sums are taken in.

    The most of several draws: one may happen to move a sum of terms that cancel a hundred times less than most do.
    """
    eps = torch.finfo(draw.wide).eps

    def off(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point():
            return tensor
        signs = torch.randint(0, 2, tensor.shape, generator=draw.generator, dtype=torch.float64) * 2 - 1
        return tensor.double() * (1 + eps * signs)

    most = [0.0] * len(exact)
    for _ in range(CONDITION_DRAWS):
        moved = tensors(exact_function(spec)(*map_tensors(off, args), **map_tensors(off, kwargs)))
        most = [max(m, worst_error(one, other)) for m, one, other in zip(most, moved, exact, strict=True)]
    return most


@dataclass(frozen=True)
class Case:
    """One call, on the CPU."""

    number: int
    args: Any
    kwargs: Any
    draw: Draw

    @classmethod
    def of(cls, spec: OpSpec, seed: int, number: int) -> Case:
        key = f"{spec.name} {seed} {number}"
        draw = Draw.of(random.Random(key).choice(spec.dtypes), key)
        if spec.name in DRAWINGS:
            return cls(number, DRAWINGS[spec.name](draw), {}, draw)
        return cls(number, *_from_samples(spec, draw), draw)


def placed(value: Any, device: torch.device) -> Any:
    """The same tensors on the device, in the same layout (strides, offset, what is between the elements).

    All of them by one copy: a process that shares a GPU with others waits its turn for each.
    """
    if device == CPU:
        return value
    sizes = [t.untyped_storage().nbytes() for t in tensors(value)]
    starts = [0]
    for size in sizes:
        starts.append(starts[-1] + (size + 255) // 256 * 256)
    packed = torch.zeros(starts[-1], dtype=torch.uint8)
    for tensor, start, size in zip(tensors(value), starts, sizes, strict=False):
        flat = tensor.as_strided((size // tensor.element_size(),), (1,), 0)
        packed[start : start + size] = flat.view(torch.uint8)
    there = packed.to(device)
    places = iter(starts)

    def view(tensor: torch.Tensor) -> torch.Tensor:
        size = tensor.element_size()
        start = next(places)
        whole = there[start : start + tensor.untyped_storage().nbytes() // size * size].view(tensor.dtype)
        return whole.as_strided(tensor.shape, tensor.stride(), start // size + tensor.storage_offset())

    return map_tensors(view, value)


def fetched(value: Any) -> Any:
    """The same values on the CPU, by one copy."""
    if all(t.device == CPU for t in tensors(value)):
        return value
    parts = [t.contiguous().as_strided((t.numel(),), (1,)).view(torch.uint8) for t in tensors(value) if t.numel()]
    packed = torch.cat(parts).cpu() if parts else torch.empty(0, dtype=torch.uint8)
    start = 0

    def take(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal start
        size = tensor.numel() * tensor.element_size()
        start += size
        return packed[start - size : start].clone().view(tensor.dtype).view(tensor.shape)

    return map_tensors(take, value)


def run_cases(spec: OpSpec, device: torch.device, seed: int, numbers: range) -> dict[int, str]:
    """What failed, by the case's number."""
    failed: dict[int, str] = {}

    def attempt(number: int, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except Exception as problem:
            failed[number] = f"{type(problem).__name__}: {str(problem)[:600]}"

    cases = {n: attempt(n, lambda n=n: Case.of(spec, seed, n)) for n in numbers}
    there = placed({n: (c.args, c.kwargs) for n, c in cases.items() if c is not None}, device)
    found = {n: attempt(n, lambda call=call: spec.op(*call[0], **call[1])) for n, call in there.items()}
    found = fetched({n: f for n, f in found.items() if f is not None})
    for number, results in found.items():
        attempt(number, lambda n=number, r=results: judge(spec, cases[n], tensors(r)))
    return failed


def judge(spec: OpSpec, case: Case, found: list[torch.Tensor]) -> None:
    """Raises where the op is wrong."""
    args, kwargs = case.args, case.kwargs
    exact = tensors(exact_function(spec)(*to_double(args), **to_double(kwargs)))
    own: list[torch.Tensor] = []
    moved: list[float] = []
    for index, (got, true) in enumerate(zip(found, exact, strict=True)):
        # What the dtype cannot hold is compared as the dtype holds it.
        held = true.to(got.dtype).double()
        finite = held[held.isfinite()].abs()
        eps = torch.finfo(got.dtype).eps if got.is_floating_point() else 0.0
        allowed = ROUNDINGS * eps * (finite.max().item() if finite.numel() else 0.0)
        error = worst_error(got, held)
        if error <= allowed:
            continue
        own = own or tensors(spec.reference(*args, **kwargs))
        allowed += 2 * worst_error(own[index], held)
        if error <= allowed:
            continue
        # A sum of terms that cancel is as exact as its terms are: not wrong where a rounding of them moves it as far.
        moved = moved or condition(spec, args, kwargs, exact, case.draw)
        inputs = [t.abs().max().item() for t in tensors((args, kwargs)) if t.is_floating_point() and t.numel()]
        allowed += ROUNDINGS * moved[index] + eps * min(inputs, default=0.0)
        # In float64 what is called exact has the reference's own roundings, whose number nobody knows.
        allowed *= 8 if got.dtype == torch.float64 else 1
        shapes = [tuple(a.shape) if isinstance(a, torch.Tensor) else a for a in args]
        assert error <= allowed, f"{case.draw.dtype} {shapes}, output {index}: error {error:.3g}, allowed {allowed:.3g}"


@dataclass(frozen=True)
class Job:
    """Cases of one op that one process runs."""

    op: str
    device: str
    seed: int
    numbers: range
    until: float  # the time (time.time) after which nothing is begun


def run_job(job: Job) -> tuple[int, list[str]]:
    """Number of cases run, and what failed."""
    torch.set_num_threads(1)
    spec = find(job.op)
    assert spec is not None, f"{job.op} is not in the table"
    failed: list[str] = []
    ran = 0
    for first in job.numbers[::TOGETHER]:
        if time.time() > job.until or len(failed) >= MOST_FAILURES:
            break
        numbers = range(first, min(first + TOGETHER, job.numbers.stop))
        with torch.no_grad():
            problems = run_cases(spec, torch.device(job.device), job.seed, numbers)
        failed += [f"case {number}: {problem}" for number, problem in problems.items()]
        ran += len(numbers)
    return ran, failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ops", nargs="*", help="default: every op of the table")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--cases", type=int, default=10_000, help="an op")
    parser.add_argument("--seconds", type=float, default=600.0, help="for all of them, at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, default=None, help="this one case alone, in this process")
    parser.add_argument("--processes", type=int, default=2)
    given = parser.parse_args()
    names = [n if "::" in n else f"opgraft::{n}" for n in given.ops] or [s.name for s in specs("opgraft")]
    if given.only is not None:
        for name in names:
            spec = find(name)
            assert spec is not None, f"{name} is not in the table"
            numbers = range(given.only, given.only + 1)
            with torch.no_grad():
                problems = run_cases(spec, torch.device(given.device), given.seed, numbers)
            print(f"{name}: {problems.get(given.only, 'right')}")
        return 0
    until = time.time() + given.seconds
    # An op after the other within every stretch of cases, so that all get as far where time is short.
    stretches = [range(i, min(i + JOB_CASES, given.cases)) for i in range(0, given.cases, JOB_CASES)]
    jobs = [Job(name, given.device, given.seed, numbers, until) for numbers in stretches for name in names]
    ran = dict.fromkeys(names, 0)
    failed: dict[str, list[str]] = {name: [] for name in names}
    with ProcessPoolExecutor(given.processes, mp_context=get_context("spawn")) as pool:
        for job, (count, problems) in zip(jobs, pool.map(run_job, jobs), strict=True):
            ran[job.op] += count
            failed[job.op] += problems
    for name in names:
        print(
            f"{name:36} {ran[name]:6} cases, {len(failed[name])} wrong ({given.device}, seed {given.seed})", flush=True
        )
        for line in failed[name][:5]:
            print(f"    {line}")
    return 1 if any(failed.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
