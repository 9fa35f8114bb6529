"""Is a model with the choice of kernels ever slower than with the compiler alone, and is each choice the better side?

    python benchmarks/choice.py [--train] [--device cuda] [--only NAME]

Every model is compiled five ways: plain torch.compile, the same again (A/A, the noise floor), choose="measured", and
both sides forced. All are timed by turns as whole steps; a ratio is the plain compile's time over the arm's.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import opgraft
from opgraft.compile import timing
from opgraft.compile.store import architecture

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))

Built = tuple[nn.Module, tuple[torch.Tensor, ...]]


class Perceptron(nn.Module):
    """Up, GELU written as plain torch, down: the idiom must be found."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(nn.functional.gelu(self.up(x), approximate="tanh"))


def perceptron(rows: int, width: int) -> Callable[[str], Built]:
    def build(device: str) -> Built:
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        return Perceptron(width).to(device, dtype), (torch.randn(rows, width, device=device, dtype=dtype),)

    return build


def transformer(device: str) -> Built:
    import transformer_block

    return transformer_block.build(device)


def models(device: str) -> dict[str, Callable[[str], Built]]:
    sizes = ((4096, 1024), (8192, 2048), (16384, 4096)) if device == "cuda" else ((64, 128), (512, 256), (2048, 256))
    return {"transformer_block": transformer, **{f"mlp {r}x{w}": perceptron(r, w) for r, w in sizes}}


def step(compiled: Callable[..., torch.Tensor], inputs: tuple[torch.Tensor, ...], train: bool) -> Callable[[], None]:
    def run() -> None:
        if not train:
            with torch.no_grad():
                compiled(*inputs)
        else:
            compiled(*inputs).float().square().mean().backward()

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--train", action="store_true")
    parser.add_argument("--only", default="")
    parser.add_argument("--seconds", type=float, default=5.0, help="timing of one pair")
    options = parser.parse_args()
    kind = "training" if options.train else "inference"
    print(f"torch {torch.__version__}, {architecture(options.device)}, {kind}")
    synchronise = torch.cuda.synchronize if options.device == "cuda" else lambda: None
    with tempfile.TemporaryDirectory() as store:
        for name, build in models(options.device).items():
            if options.only in name:
                print(name, flush=True)
                torch._dynamo.reset()
                _compare(*build(options.device), store, options.train, options.seconds, synchronise)


def _compare(
    model: nn.Module,
    inputs: tuple[torch.Tensor, ...],
    store: str,
    train: bool,
    seconds: float,
    synchronise: Callable[[], None],
) -> None:
    arms = {
        "plain": None,
        "A/A": None,
        "measured": opgraft.compile_options(store=store),
        "kernel": opgraft.compile_options(choose="kernel"),
        "compiler": opgraft.compile_options(choose="compiler"),
    }
    steps, first = {}, {}
    for arm, chosen in arms.items():
        own = _with_code_of_its_own(model, arm)
        compiled = torch.compile(own, options=chosen) if chosen else torch.compile(own)
        steps[arm] = step(compiled, inputs, train)
        began = time.perf_counter()
        steps[arm]()
        synchronise()
        first[arm] = time.perf_counter() - began
    with torch.set_grad_enabled(train):
        for report in opgraft.sites(model, inputs, store=store):
            print(f"  {report}")
    for arm in list(arms)[1:]:
        samples = timing.interleave(steps["plain"], steps[arm], seconds=seconds, synchronise=synchronise)
        verdict = timing.judge(samples)
        low, high = verdict.interval
        print(
            f"  {arm:9} {verdict.ratio:.3f} [{low:.3f}, {high:.3f}]   step {1e3 * samples.medians[1]:.2f} ms"
            f"   first call {first[arm]:.1f} s (plain {first['plain']:.1f} s)",
            flush=True,
        )


def _with_code_of_its_own(model: nn.Module, arm: str) -> Callable[..., torch.Tensor]:
    """The model as a function with a code object of its own: Dynamo tries all that share one in order."""

    def call(*inputs: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = model(*inputs)
        return result

    call.__code__ = call.__code__.replace(co_name="call_" + "".join(c if c.isalnum() else "_" for c in arm))
    return call


if __name__ == "__main__":
    main()
