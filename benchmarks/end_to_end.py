"""Models x placements of an op, each against the compiler: ratio, verdict, what was foretold, what is unexplained.

    python benchmarks/end_to_end.py                      every case, fresh processes
    python benchmarks/end_to_end.py --short --cases vit  one process, a few seconds

A case is a function that returns (model, inputs): ``opgraft compare benchmarks/end_to_end.py:vit`` runs it alone.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import opgraft

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
import gelu_mlp

CUDA = torch.cuda.is_available()
DEVICE, DTYPE = ("cuda", torch.bfloat16) if CUDA else ("cpu", torch.float32)
Built = tuple[nn.Module, Any]


class Gelu(nn.Module):
    """The op as an activation module."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return opgraft.gelu(x)


def with_op(model: nn.Module) -> nn.Module:
    """Puts the op in place of every tanh GELU module of a model."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            tanh = isinstance(child, nn.GELU) and child.approximate == "tanh"
            if tanh or type(child).__name__ in ("NewGELUActivation", "GELUTanh", "PytorchGELUTanh"):
                setattr(parent, name, Gelu())
    return model.to(device=DEVICE, dtype=DTYPE)


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE, dtype=DTYPE)


def mlp_tiny() -> Built:
    return gelu_mlp.make(64, 1024) if CUDA else gelu_mlp.make(32, 64, layers=2)


def mlp_small() -> Built:
    return gelu_mlp.make(1024, 1024) if CUDA else gelu_mlp.make(128, 128, layers=2)


def mlp_medium() -> Built:
    return gelu_mlp.make(8192, 1024) if CUDA else gelu_mlp.make(512, 256, layers=2)


def mlp_large() -> Built:
    return gelu_mlp.make(8192, 2048) if CUDA else gelu_mlp.make(2048, 256, layers=2)


def llama() -> Built:
    """transformers' Llama with the tanh GELU in its gated MLP, prefill."""
    from transformers import LlamaConfig, LlamaModel

    torch.manual_seed(0)
    width, layers, tokens = (1024, 4, 2048) if CUDA else (128, 2, 64)
    config = LlamaConfig(
        hidden_size=width, intermediate_size=4 * width, num_hidden_layers=layers, num_attention_heads=8,
        num_key_value_heads=8, vocab_size=1024, hidden_act="gelu_pytorch_tanh", use_cache=False,
    )  # fmt: skip
    return with_op(LlamaModel(config)), {"input_ids": torch.randint(0, 1024, (2, tokens), device=DEVICE)}


def vit() -> Built:
    """transformers' ViT from a config, image classification."""
    from transformers import ViTConfig, ViTModel

    torch.manual_seed(0)
    width, layers, batch, size = (768, 6, 32, 224) if CUDA else (96, 2, 2, 64)
    config = ViTConfig(
        hidden_size=width, intermediate_size=4 * width, num_hidden_layers=layers, num_attention_heads=12 if CUDA else 4,
        image_size=size, hidden_act="gelu_pytorch_tanh", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return with_op(ViTModel(config)), {"pixel_values": random(batch, 3, size, size)}


def convnet() -> Built:
    """Convolutions with batch normalisation and the op between them: the compiler would fuse both."""
    torch.manual_seed(0)
    width, batch, size = (128, 64, 56) if CUDA else (16, 4, 32)

    def stage(a: int, b: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(a, b, 3, padding=1, bias=False), nn.BatchNorm2d(b), nn.GELU(approximate="tanh"))

    model = nn.Sequential(stage(3, width), *(stage(width, width) for _ in range(4)), nn.AdaptiveAvgPool2d(1))
    return with_op(model.eval()), (random(batch, 3, size, size),)


class GraphNetwork(nn.Module):
    """Message passing: gather, MLP with the op, scatter-add."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.message = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(layers))
        self.update = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        for message, update in zip(self.message, self.update, strict=True):
            sent = opgraft.gelu(message(torch.cat([x[source], x[target]], dim=-1)))
            x = x + update(torch.zeros_like(x).index_add(0, target, sent))
        return x


def gnn() -> Built:
    torch.manual_seed(0)
    nodes, edges, width = (32768, 262144, 128) if CUDA else (512, 4096, 32)
    model = GraphNetwork(width, 3).to(device=DEVICE, dtype=DTYPE)
    source, target = (torch.randint(0, nodes, (edges,), device=DEVICE) for _ in range(2))
    return model, (random(nodes, width), source, target)


class Norm(nn.Module):
    """The op as an RMS norm that rounds as transformers' Llama does."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.weight, self.eps = norm.weight, norm.variance_epsilon

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return opgraft.rms_norm(x, self.weight, self.eps, cast_before_weight=True)


def llama_norms() -> Built:
    """transformers' Llama, prefill, with the op as every RMS norm: what stands around them is mostly fusible."""
    from transformers import LlamaConfig, LlamaModel

    torch.manual_seed(0)
    width, layers, tokens = (1024, 4, 2048) if CUDA else (128, 2, 64)
    config = LlamaConfig(
        hidden_size=width, intermediate_size=4 * width, num_hidden_layers=layers, num_attention_heads=8,
        num_key_value_heads=8, vocab_size=1024, use_cache=False,
    )  # fmt: skip
    model = LlamaModel(config).to(device=DEVICE, dtype=DTYPE)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child).__name__ == "LlamaRMSNorm":
                setattr(parent, name, Norm(child))
    return model, {"input_ids": torch.randint(0, 1024, (2, tokens), device=DEVICE)}


class Head(nn.Module):
    """The end of a language model: logits and their loss."""

    def __init__(self, width: int, vocabulary: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss = opgraft.cross_entropy(self.head(self.norm(hidden)), labels)
        assert isinstance(loss, torch.Tensor)
        return loss


def loss_head() -> Built:
    """A norm, the product with a large vocabulary, and the op as the loss."""
    torch.manual_seed(0)
    width, vocabulary, tokens = (2048, 128256, 8192) if CUDA else (64, 4096, 256)
    model = Head(width, vocabulary).to(device=DEVICE, dtype=DTYPE)
    return model, (random(tokens, width), torch.randint(0, vocabulary, (tokens,), device=DEVICE))


@dataclass(frozen=True)
class Case:
    name: str
    build: Callable[[], Built]
    train: bool = False
    mode: str | None = None
    op: str = "opgraft::gelu"

    @property
    def title(self) -> str:
        return f"{self.name}{', training' if self.train else ''}{', ' + self.mode if self.mode else ''}"


_BUILDS = (mlp_tiny, mlp_small, mlp_medium, mlp_large, llama, vit, convnet, gnn)
CASES = (
    *(Case(b.__name__, b) for b in _BUILDS),
    *(Case(b.__name__, b, train=True) for b in (mlp_small, mlp_large, llama, vit, gnn)),
    *(Case("llama_norms", llama_norms, train=train, op="opgraft::rms_norm") for train in (False, True)),
    Case("loss_head", loss_head, op="opgraft::cross_entropy"),
    *(Case(b.__name__, b, mode="reduce-overhead") for b in (_BUILDS if CUDA else ())),
)


@dataclass(frozen=True)
class Line:
    """What one case came to. Ratios are compiler over op, times in microseconds."""

    title: str
    compiler_us: float | None = None
    op_us: float | None = None
    isolated: float | None = None
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    verdict: str | None = None
    predicted_error: float | None = None
    unexplained: float | None = None
    problem: str = ""
    seconds: float = 0.0


def run(case: Case, seconds: float, processes: int, short: bool) -> Line:
    from opgraft.diagnostics.measure.compare import compare, compare_file

    begin = time.monotonic()
    options: dict[str, Any] = {"mode": case.mode} if case.mode else {}
    try:
        if short:
            model, inputs = case.build()
            report = compare(
                model, inputs, [case.op], arms=["op"], train=case.train, seconds=seconds,
                compile_options=options, predict=True, progress=telling(case.title),
            )  # fmt: skip
        else:
            report = compare_file(
                f"{__file__}:{case.name}", [case.op], arms=["op"], train=case.train, seconds=seconds,
                compile_options=options, predict=True, processes=processes, progress=telling(case.title),
            )  # fmt: skip
    except Exception as error:  # one case must not end the suite
        return Line(case.title, problem=f"{type(error).__name__}: {error}".splitlines()[0][:90])
    found = report.ledger
    assert found is not None
    rows = {r.name: r for r in found.arms}
    if "op" not in rows or "compiler" not in rows:
        return Line(case.title, problem=found.sentence[:90])
    op, base = rows["op"], rows["compiler"]
    isolated = base.isolated_us / op.isolated_us if base.isolated_us and op.isolated_us else None
    problems = [f.message for f in report.findings if f.kind in ("invalid-measurement", "kernel-not-run")]
    return Line(
        case.title,
        base.step_us,
        op.step_us,
        isolated,
        op.ratio,
        op.ratio_low,
        op.ratio_high,
        op.verdict,
        found.predictions[0].error if found.predictions else None,
        found.ledgers[0].unexplained_share if found.ledgers else None,
        problems[0][:90] if problems else "",
        time.monotonic() - begin,
    )


def telling(title: str) -> Callable[[str, float], None]:
    """What a case is doing, and for how long already: on a terminal one line that is written over, else nothing."""
    begin = time.monotonic()

    def tell(message: str, share: float) -> None:
        if sys.stderr.isatty():
            line = f"{title}: {message} ({share:.0%}, {time.monotonic() - begin:.0f} s)"
            sys.stderr.write(f"\r{line[:110]:<110}\r")
            sys.stderr.flush()

    return tell


def show(line: Line) -> str:
    def number(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    half = (line.high - line.low) / 2 if line.high is not None and line.low is not None else None
    return (
        f"{line.title:<34}{number(line.compiler_us, '>12,.1f')}{number(line.op_us, '>12,.1f')}"
        f"{number(line.isolated, '>8.2f')}x{number(line.ratio, '>9.3f')} +-{number(half, '.3f')} "
        f"{line.verdict or '-':<11}{number(line.predicted_error, '>+8.1%')}{number(line.unexplained, '>8.1%')}"
        f"{line.seconds:>7.0f} s  {line.problem}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", help="names with commas; all by default")
    parser.add_argument("--seconds", type=float, help="timing a case; 40, or 6 with --short")
    parser.add_argument("--processes", type=int, default=5)
    parser.add_argument("--short", action="store_true", help="in this process")
    parser.add_argument("--limit", type=float, help="seconds after which no further case starts")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    wanted = options.cases.split(",") if options.cases else None
    seconds = options.seconds or (6.0 if options.short else 40.0)
    begin = time.monotonic()
    titles = f"{'case':<34}{'compiler us':>12}{'op us':>12}{'alone':>9}{'ratio':>9}{'':>9}{'verdict':<11}"
    print(f"{titles}{'foretold':>8}{'unexpl.':>8}")
    lines: list[Line] = []
    for case in CASES:
        if wanted is not None and case.name not in wanted and case.title not in wanted:
            continue
        if options.limit and time.monotonic() - begin > options.limit:
            print(f"(stopped after {options.limit:.0f} s)")
            break
        if options.short:
            torch.compiler.reset()
        lines.append(run(case, seconds, options.processes, options.short))
        print(show(lines[-1]), flush=True)
    errors = [abs(line.predicted_error) for line in lines if line.predicted_error is not None]
    rests = [line.unexplained for line in lines if line.unexplained is not None]
    if errors and rests:
        print(f"median: foretold within {statistics.median(errors):.1%}, unexplained {statistics.median(rests):.1%}")
    where = torch.cuda.get_device_name() if CUDA else "CPU"
    print(f"{where}, torch {torch.__version__}, {DTYPE}, {time.monotonic() - begin:.0f} s")
    if options.json:
        options.json.write_text(json.dumps([asdict(line) for line in lines], indent=1))


if __name__ == "__main__":
    main()
