"""A transformers Mamba with and without opgraft.patch: a training step, eager and compiled, and the time to compile.

python benchmarks/models.py [--layers 2] [--hidden 256] [--batch 2] [--length 512] [--device cpu] [--compile-original]

Values are compared by opgraft.patch itself before anything is timed. The original unrolls its scan step by step, so its
compilation takes minutes from a length of about 64 on; it is left out unless asked for.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import transformers

import opgraft


def step(model: Any, tokens: torch.Tensor) -> None:
    model(tokens, use_cache=False).logits.float().square().mean().backward()
    if tokens.is_cuda:
        torch.cuda.synchronize()


def milliseconds(call: Callable[[], None], repeats: int) -> float:
    call()
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return 1e3 * statistics.median(times)


def compiled_milliseconds(model: Any, tokens: torch.Tensor, repeats: int) -> tuple[float, float]:
    """Milliseconds a step, and seconds of the first one."""
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True)
    started = time.perf_counter()
    step(compiled, tokens)
    first = time.perf_counter() - started
    return milliseconds(lambda: step(compiled, tokens), repeats), first


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("layers", 2), ("hidden", 256), ("batch", 2), ("length", 512), ("repeats", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default=None, help="default: bfloat16 on a GPU, float32 on the CPU")
    parser.add_argument("--compile-original", action="store_true")
    given = parser.parse_args()
    dtype = getattr(torch, given.dtype or ("bfloat16" if given.device == "cuda" else "float32"))
    torch.manual_seed(0)
    config = transformers.MambaConfig(vocab_size=1000, hidden_size=given.hidden, num_hidden_layers=given.layers)
    model = transformers.MambaForCausalLM(config).to(device=given.device, dtype=dtype).train()
    tokens = torch.randint(0, 1000, (given.batch, given.length), device=given.device)
    print(
        f"torch {torch.__version__}, transformers {transformers.__version__}, {dtype} on {given.device}: {vars(given)}"
    )
    original = milliseconds(lambda: step(model, tokens), 2)
    print(f"original eager     {original:10.1f} ms", flush=True)
    if given.compile_original:
        took, first = compiled_milliseconds(model, tokens, given.repeats)
        print(f"original compiled  {took:10.1f} ms, first step {first:.1f} s", flush=True)
    report = opgraft.patch(model)
    print(report)
    took = milliseconds(lambda: step(model, tokens), given.repeats)
    print(f"patched eager      {took:10.1f} ms, {original / took:.1f}x", flush=True)
    took, first = compiled_milliseconds(model, tokens, given.repeats)
    print(f"patched compiled   {took:10.1f} ms, {original / took:.1f}x of the original eager, first step {first:.1f} s")


if __name__ == "__main__":
    main()
