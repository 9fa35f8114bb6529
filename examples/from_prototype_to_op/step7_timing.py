"""Step 7, honest timing: what a stopwatch around a call measures, and what it should.

Shows: the first call beside a warm one; on a GPU a clock that does not wait for the kernel beside CUDA events, and
triton's do_bench as a second opinion where there is triton; and the only scale on which a memory-bound kernel's time
means something, the share of the copy bandwidth measured in the same process. The op is step 3's.
Run:    python examples/from_prototype_to_op/step7_timing.py
Expect: a first call far slower than a warm one; on a GPU a stopwatch that shows microseconds at every size, since it
        times the launch; a share of the copy rate below 100 % at a size beyond the caches.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable

import torch
from reference import check, sample
from step3_extension import extension
from timing import beside_copy_us, host_us, synchronize

LARGE = {"cuda": 1 << 26, "cpu": 1 << 22}


def stopwatch_us(call: Callable[[], object]) -> float:
    """The mistake: one call, no warm-up, no wait for the device."""
    begin = time.perf_counter()
    call()
    return (time.perf_counter() - begin) * 1e6


def do_bench_us(call: Callable[[], object]) -> float | None:
    """triton's own timing, which flushes the L2 and takes events as well; None without triton or without a GPU."""
    if importlib.util.find_spec("triton") is None or not torch.cuda.is_available():
        return None
    from triton.testing import do_bench

    return float(do_bench(call, return_mode="median")) * 1e3


def main() -> None:
    gelu = extension().gelu
    device = sample(1).device if extension().has_cuda else torch.device("cpu")
    small = sample(1024).to(device)
    large = sample(1 << 10).to(device).repeat(LARGE[device.type] >> 10)
    moved = 2 * large.numel() * large.element_size()

    synchronize(device)
    first = stopwatch_us(lambda: gelu(large))
    synchronize(device)
    again = stopwatch_us(lambda: gelu(large))
    synchronize(device)
    honest, copy = beside_copy_us(lambda: gelu(large), large)
    check("step 7, what is timed", gelu(small), small)

    print(f"{large.numel()} elements of float32, {moved / 1e6:.0f} MB read and written, on {device}")
    print(f"stopwatch, first call          {first:12.1f} us   (loads, allocates, maps memory)")
    print(f"stopwatch, second call         {again:12.1f} us   ", end="")
    print("(the launch; the kernel runs on)" if device.type == "cuda" else "(one sample of a noisy machine)")
    print(f"after warm-up, median          {honest:12.1f} us   {moved / honest / 1e3:.1f} GB/s")
    second_opinion = do_bench_us(lambda: gelu(large))
    if second_opinion is None:
        print("triton.testing.do_bench        needs triton and a GPU")
    else:
        print(f"triton.testing.do_bench        {second_opinion:12.1f} us")
    print(f"x.clone(), taking turns        {copy:12.1f} us   {moved / copy / 1e3:.1f} GB/s")
    print(f"share of the copy bandwidth    {copy / honest:12.0%}")
    print(f"host time a call, 1024 elements{host_us(lambda: gelu(small), device):12.1f} us")


if __name__ == "__main__":
    main()
