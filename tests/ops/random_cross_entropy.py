"""Random calls of cross_entropy against float64: values, gradients, and how exact the reference is in the same dtype.

python tests/ops/random_cross_entropy.py [--cases 10000] [--device cuda] [--seed 0] [--processes 1]

Calls are drawn and judged on the device, and what was found is read many calls at a time: waiting for the device took
most of the time.
"""

from __future__ import annotations

import argparse
import random
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import torch

import opgraft
from opgraft.ops.cross_entropy_reference import reference

from table import largest_difference

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
REDUCTIONS = ("none", "mean", "sum")
RESULTS = ("loss", "lse", "gradient")
READ_AT_ONCE = 64


def draw(random_: random.Random, device: torch.device) -> dict[str, Any]:
    """One call: sizes around every boundary of the kernels, any layout, any options."""
    dtype = random_.choice(DTYPES)
    around = random_.choice((1, 8, 33, 500, 1024, 2048, 4096, 8192, 16384, 50000))
    classes = max(1, around + random_.randint(-9, 9)) if around > 1 else random_.randint(1, 9)
    rows = random_.randint(0 if random_.random() < 0.05 else 1, max(1, min(40, 200_000 // classes)))
    generator = torch.Generator(device).manual_seed(random_.randrange(2**62))
    scale = random_.choice((0.1, 1.0, 1.0, 8.0, 100.0))
    offset = random_.choice((0.0, 0.0, 50.0, -300.0))

    def normal(*sizes: int) -> torch.Tensor:
        return (torch.randn(sizes, generator=generator, device=device) * scale + offset).to(dtype)

    def uniform(*sizes: int) -> torch.Tensor:
        return torch.rand(sizes, generator=generator, device=device)

    layout = random_.choice(("dense", "sliced", "offset", "transposed", "three", "shifted", "one row"))
    if layout == "sliced":
        logits = normal(rows, classes + random_.randint(1, 9))[:, :classes]
    elif layout == "offset":
        start = random_.randint(1, 9)
        logits = normal(rows, classes + start)[:, start:]
    elif layout == "transposed":
        logits = normal(classes, rows).t()
    elif layout == "three":
        logits = normal(2, rows, classes)
    elif layout == "shifted":
        logits = normal(2, rows + 1, classes)[:, :-1]
    elif layout == "one row":
        logits = normal(classes)
    else:
        logits = normal(rows, classes)
    if random_.random() < 0.1:
        logits = logits.masked_fill(uniform(*logits.shape) < 0.3, -torch.inf)
    target = torch.randint(0, classes, logits.shape[:-1], generator=generator, device=device)
    ignore_index = random_.choice((-100, -1, 0))
    target.masked_fill_(uniform(*target.shape) < random_.choice((0.0, 0.3)), ignore_index)
    wide = torch.promote_types(dtype, torch.float32)
    weighted = random_.random() < 0.3
    return {
        "logits": logits,
        "target": target.to(random_.choice((torch.int64, torch.int32))),
        "weight": (uniform(classes) + 0.5).to(wide) if weighted else None,
        "ignore_index": ignore_index,
        "label_smoothing": random_.choice((0.0, 0.0, 0.1, 1.0)),
        "z_loss": random_.choice((0.0, 0.0, 1e-4, 0.1)),
        "softcap": random_.choice((0.0, 0.0, 5.0, 30.0)),
        "reduction": random_.randrange(3),
    }


def outputs(function: Any, call: dict[str, Any], factor: float, lse_too: bool) -> list[torch.Tensor]:
    """Loss, lse, and the gradient of their weighted sum."""
    logits = call["logits"].detach().requires_grad_()
    loss, lse = function(**{**call, "logits": logits})
    total = (loss * factor).sum() + (lse.sin().sum() if lse_too else 0)
    (gradient,) = torch.autograd.grad(total, logits)
    return [loss.detach(), lse.detach(), gradient]


def _op(reduction: int, softcap: float, logits: torch.Tensor, target: torch.Tensor, **given: Any) -> Any:
    options = {"reduction": REDUCTIONS[reduction], "softcap": softcap or None, "return_lse": True}
    return opgraft.cross_entropy(logits, target, **options, **given)


def _reference(**call: Any) -> Any:
    return reference(**call)[:2]


def judged(call: dict[str, Any], factor: float, lse_too: bool) -> torch.Tensor:
    """The errors of the op's answer to one call, and what is allowed where it is as exact as the reference: (3, 2)."""
    found = outputs(_op, call, factor, lse_too)
    own = outputs(_reference, call, factor, lse_too)
    doubled = {k: v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v for k, v in call.items()}
    exact = outputs(_reference, doubled, factor, lse_too)
    ignored = (call["target"] == call["ignore_index"]).unsqueeze(-1)
    rows = []
    for name, got, mine, true in zip(RESULTS, found, own, exact, strict=True):
        if name == "gradient" and not lse_too:
            mine, true = mine.masked_fill(ignored, 0), true.masked_fill(ignored, 0)
        scale = _largest(true)
        true = true.to(got.dtype).double()
        # In float64 the exact result is the reference's own, so its rounding is allowed for as well.
        roundings = 256 if got.dtype == torch.float64 else 4
        allowed = 2 * largest_difference(mine, true) + roundings * torch.finfo(got.dtype).eps * scale
        if name == "loss":
            # A loss near zero is a small difference of a row's lse and its target.
            allowed += roundings * torch.finfo(got.dtype).eps * _largest(exact[1])
        if name == "gradient":
            # Saturated caps and smoothing leave small differences of larger terms, which are rounded as what they are.
            allowed += roundings * 2 * torch.finfo(found[0].dtype).eps * _terms(doubled, exact[1]) * factor
        # Below the normal numbers a rounding is no share of the result but a step of fixed size.
        allowed += torch.finfo(got.dtype).smallest_normal * torch.finfo(got.dtype).eps
        rows.append(torch.stack([largest_difference(got, true), allowed]))
    return torch.stack(rows)


def _largest(values: torch.Tensor) -> torch.Tensor:
    """The largest finite magnitude, zero where there is none."""
    sizes = values.abs().where(values.isfinite(), 0.0)
    return sizes.max() if sizes.numel() else sizes.new_zeros(())


def _terms(call: dict[str, Any], lse: torch.Tensor) -> torch.Tensor:
    """The size of the terms whose difference a gradient is: the largest probability, and the target's share."""
    x = call["logits"]
    capped = call["softcap"] * torch.tanh(x / call["softcap"]) if call["softcap"] else x
    largest = _largest((capped - lse.unsqueeze(-1)).exp())
    size = largest.clamp_min(1 - call["label_smoothing"]) * (1.0 if call["weight"] is None else 1.5)
    return size / max(1, lse.numel()) if call["reduction"] == 1 else size


def run(cases: int, device: torch.device, seed: int) -> list[str]:
    random_ = random.Random(seed)
    faults: list[str] = []
    waiting: list[tuple[str, torch.Tensor]] = []

    def read() -> None:
        for words, rows in zip([w for w, _ in waiting], torch.stack([r for _, r in waiting]).tolist(), strict=True):
            for name, (error, allowed) in zip(RESULTS, rows, strict=True):
                if not error <= allowed:
                    faults.append(f"{words}: {name}: error {error:.3g}, allowed {allowed:.3g}")
        waiting.clear()

    for index in range(cases):
        call = draw(random_, device)
        factor, lse_too = random_.choice((1.0, 1.0, 0.37)), random_.random() < 0.2
        said = ", ".join(f"{name} {_words(value)}" for name, value in call.items())
        waiting.append((f"case {index}: {said}, incoming {factor}, lse {lse_too}", judged(call, factor, lse_too)))
        if len(waiting) == READ_AT_ONCE or index == cases - 1:
            read()
    return faults


def _words(value: Any) -> str:
    return f"{value.dtype} {tuple(value.shape)} {value.stride()}" if isinstance(value, torch.Tensor) else str(value)


def run_part(cases: int, device: str, seed: int) -> list[str]:
    torch.set_num_threads(1)
    return run(cases, torch.device(device), seed)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=10000)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--processes", type=int, default=1, help="each draws its share of the cases from a seed of its own"
    )
    given = parser.parse_args()
    share = -(-given.cases // given.processes)
    with ProcessPoolExecutor(given.processes, mp_context=get_context("spawn")) as pool:
        seeds = range(given.seed * given.processes, (given.seed + 1) * given.processes)
        jobs = [pool.submit(run_part, share, given.device, seed) for seed in seeds]
        wrong = [line for job in jobs for line in job.result()]
    print("\n".join(wrong[:20]))
    print(f"{share * given.processes} random calls on {given.device}, {len(wrong)} wrong")
