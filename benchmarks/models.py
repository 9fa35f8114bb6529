"""A transformers Mamba with and without opgraft.patch: a training step, eager and compiled, and the time to compile.

python benchmarks/models.py [--layers 2] [--hidden 256] [--batch 2] [--length 512] [--device cpu] [--compile-original]
                            [--no-eager] [--no-original] [--inference] [--mode reduce-overhead]

Values are compared by opgraft.patch itself before anything is timed. The arms are the model as transformers runs it,
which calls the kernels of causal-conv1d and mamba_ssm where these packages are installed, and the patched model; each
eager and compiled. Without the packages the original unrolls its scan step by step, so its compilation takes minutes
from a length of about 64 on: it is left out then unless asked for. A step is forward, loss and backward, without an
optimizer; with --inference the forward pass alone, without gradients.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers

import opgraft


@dataclass(frozen=True)
class Compiled:
    milliseconds: float
    first_step: float  # seconds, of which most is compilation
    graphs: int
    breaks: int


def step(model: Any, tokens: torch.Tensor, inference: bool) -> None:
    if inference:
        with torch.no_grad():
            model(tokens, use_cache=False)
        return
    model.zero_grad(set_to_none=True)
    model(tokens, labels=tokens, use_cache=False).loss.backward()


def milliseconds(call: Callable[[], None], repeats: int, device: torch.device) -> float:
    """Median of single steps, after two that are thrown away."""
    times = []
    for _ in range(repeats + 2):
        if device.type == "cuda":
            torch.cuda.synchronize()
        started = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return 1e3 * statistics.median(times[2:])


def compiled(model: Any, tokens: torch.Tensor, given: argparse.Namespace, fullgraph: bool) -> Compiled:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    function = torch.compile(model, fullgraph=fullgraph, mode=given.mode)
    started = time.perf_counter()
    step(function, tokens, given.inference)
    if tokens.is_cuda:
        torch.cuda.synchronize()
    first = time.perf_counter() - started
    counters = torch._dynamo.utils.counters
    took = milliseconds(lambda: step(function, tokens, given.inference), given.repeats, tokens.device)
    return Compiled(took, first, counters["stats"]["unique_graphs"], sum(counters["graph_break"].values()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("layers", 2), ("hidden", 256), ("batch", 2), ("length", 512), ("repeats", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--vocabulary", type=int, default=1000)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default=None, help="default: bfloat16 on a GPU, float32 on the CPU")
    parser.add_argument("--compile-original", action="store_true")
    parser.add_argument("--no-eager", action="store_true", help="compiled arms alone")
    parser.add_argument("--no-original", action="store_true", help="the patched model alone")
    parser.add_argument("--inference", action="store_true", help="the forward pass alone")
    parser.add_argument("--mode", default=None, help="torch.compile's mode")
    given = parser.parse_args()
    dtype = getattr(torch, given.dtype or ("bfloat16" if given.device == "cuda" else "float32"))
    device = torch.device(given.device)
    installed = [name for name in ("causal_conv1d", "mamba_ssm") if importlib.util.find_spec(name) is not None]
    original = f"original ({', '.join(installed) or 'plain torch'})"
    torch.manual_seed(0)
    config = transformers.MambaConfig(
        vocab_size=given.vocabulary, hidden_size=given.hidden, num_hidden_layers=given.layers
    )
    model = transformers.MambaForCausalLM(config).to(device=device, dtype=dtype).train(not given.inference)
    tokens = torch.randint(0, given.vocabulary, (given.batch, given.length), device=device)
    where = torch.cuda.get_device_name() if device.type == "cuda" else f"{torch.get_num_threads()} CPU threads"
    print(f"{where}, torch {torch.__version__}, transformers {transformers.__version__}, {dtype}: {vars(given)}")
    times: dict[str, float] = {}

    def eager(name: str) -> None:
        if not given.no_eager:
            times[f"{name} eager"] = took = milliseconds(
                lambda: step(model, tokens, given.inference), given.repeats, device
            )
            print(f"{name + ', eager':44} {took:10.1f} ms", flush=True)

    def compile_it(name: str, fullgraph: bool) -> None:
        found = compiled(model, tokens, given, fullgraph)
        times[f"{name} compiled"] = found.milliseconds
        print(
            f"{name + ', compiled':44} {found.milliseconds:10.1f} ms, first step {found.first_step:.1f} s, "
            f"{found.graphs} graphs, {found.breaks} breaks",
            flush=True,
        )

    if not given.no_original:
        eager(original)
        if given.compile_original or (device.type == "cuda" and len(installed) == 2):
            compile_it(original, fullgraph=False)
    print(opgraft.patch(model))
    eager("patched")
    compile_it("patched", fullgraph=True)
    for arm in (f"{original} eager", f"{original} compiled"):
        if arm in times:
            print(f"patched and compiled is {times[arm] / times['patched compiled']:.2f}x as fast as {arm}")


if __name__ == "__main__":
    main()
