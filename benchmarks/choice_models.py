"""The models of ``benchmarks/choice.py``: plain torch, and transformers from configs.

A builder gives a function of tensors that returns one tensor, and its inputs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

Built = tuple[nn.Module, tuple[torch.Tensor, ...]]
Builder = Callable[[str], Built]


class Perceptron(nn.Module):
    """Up, tanh GELU, down."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down(F.gelu(self.up(x), approximate="tanh"))
        return out


class Logits(nn.Module):
    """A transformers model as a function of tensors: its logits or hidden state, or its loss where labels are given."""

    def __init__(self, model: nn.Module, loss: bool = False) -> None:
        super().__init__()
        self.model = model
        self.loss = loss

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        extra: dict[str, Any] = {"labels": given} if self.loss else {}
        out: torch.Tensor = self.model(given, return_dict=True, **extra)[0]
        return out


class ConvNet(nn.Module):
    """Blocks of a depthwise convolution, a norm over channels, and a pointwise MLP with a GELU."""

    def __init__(self, width: int, blocks: int = 3) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 4, stride=4)
        self.depthwise = nn.ModuleList(nn.Conv2d(width, width, 7, padding=3, groups=width) for _ in range(blocks))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(blocks))
        self.mlps = nn.ModuleList(Perceptron(width) for _ in range(blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for depthwise, norm, mlp in zip(self.depthwise, self.norms, self.mlps, strict=True):
            x = x + mlp(norm(depthwise(x).permute(0, 2, 3, 1))).permute(0, 3, 1, 2)
        return x


class GraphNet(nn.Module):
    """Messages over edges, summed at their targets, then an MLP with a GELU written out."""

    def __init__(self, width: int, layers: int = 3) -> None:
        super().__init__()
        self.messages = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(layers))
        self.updates = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(layers))

    def forward(self, nodes: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        for message, update in zip(self.messages, self.updates, strict=True):
            pair = message(torch.cat([nodes[edges[0]], nodes[edges[1]]], dim=-1))
            sent = 0.5 * pair * (1 + torch.tanh(0.7978845608 * (pair + 0.044715 * pair**3)))
            summed = torch.zeros_like(nodes).index_add(0, edges[1], sent)
            nodes = nodes + update(torch.cat([nodes, summed], dim=-1))
        return nodes


def dtype_on(device: str) -> torch.dtype:
    return torch.bfloat16 if device == "cuda" else torch.float32


def perceptron(rows: int, width: int) -> Builder:
    def build(device: str) -> Built:
        dtype = dtype_on(device)
        return Perceptron(width).to(device, dtype), (torch.randn(rows, width, device=device, dtype=dtype),)

    return build


def gelu_mlp(rows: int, width: int) -> Builder:
    def build(device: str) -> Built:
        import gelu_mlp as example

        model, inputs = example.make(rows, width, layers=8 if device == "cuda" else 2)
        return model.to(device, dtype_on(device)), tuple(x.to(device, dtype_on(device)) for x in inputs)

    return build


def transformer_block(device: str) -> Built:
    import transformer_block as example

    return example.build(device)


def language(name: str, *, loss: bool = False, **own: Any) -> Builder:
    """A transformers model over tokens, from its config class."""

    def build(device: str) -> Built:
        import transformers

        large = device == "cuda"
        width, layers, vocabulary = (1024, 2, 32000) if large else (256, 2, 4000)
        heads = 8
        common = {
            "llama": {
                "vocab_size": vocabulary, "hidden_size": width, "intermediate_size": 4 * width,
                "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": heads,
                "use_cache": False,
            },
            "bert": {
                "vocab_size": vocabulary, "hidden_size": width, "intermediate_size": 4 * width,
                "num_hidden_layers": layers, "num_attention_heads": heads,
            },
            "t5": {
                "vocab_size": vocabulary, "d_model": width, "d_ff": 4 * width, "num_layers": layers, "num_heads": heads,
                "d_kv": width // heads, "feed_forward_proj": "gated-gelu",
            },
            "mamba": {"vocab_size": vocabulary, "hidden_size": width, "num_hidden_layers": layers, "use_cache": False},
        }  # fmt: skip
        kinds = {
            "llama": ("LlamaConfig", "LlamaForCausalLM", "llama"),
            "qwen": ("Qwen3Config", "Qwen3ForCausalLM", "llama"),
            "gemma": ("GemmaConfig", "GemmaForCausalLM", "llama"),
            "bert": ("BertConfig", "BertModel", "bert"),
            "t5": ("T5Config", "T5EncoderModel", "t5"),
            "mamba": ("MambaConfig", "MambaForCausalLM", "mamba"),
        }
        config_class, model_class, family = kinds[name]
        config = getattr(transformers, config_class)(**{**common[family], **own})
        torch.manual_seed(0)
        model = Logits(getattr(transformers, model_class)(config), loss)
        batch, tokens = (4, 1024) if large else (2, 128)
        if name == "mamba":
            tokens = 16 if large else 64  # transformers' loop over time is unrolled by the compile
        ids = torch.randint(0, vocabulary, (batch, tokens), device=device)
        return model.to(device, dtype_on(device)), (ids,)

    return build


def vit(device: str) -> Built:
    import transformers

    width, layers = (768, 4) if device == "cuda" else (192, 2)
    config = transformers.ViTConfig(
        hidden_size=width, intermediate_size=4 * width, num_hidden_layers=layers, num_attention_heads=width // 64
    )
    torch.manual_seed(0)
    model = Logits(transformers.ViTModel(config, add_pooling_layer=False)).to(device, dtype_on(device))
    batch = 32 if device == "cuda" else 2
    return model, (torch.randn(batch, 3, 224, 224, device=device, dtype=dtype_on(device)),)


def convnet(device: str) -> Built:
    width, batch, side = (256, 32, 224) if device == "cuda" else (64, 2, 64)
    dtype = dtype_on(device)
    return ConvNet(width).to(device, dtype), (torch.randn(batch, 3, side, side, device=device, dtype=dtype),)


def graphnet(device: str) -> Built:
    width, nodes, edges = (256, 20_000, 200_000) if device == "cuda" else (64, 500, 4000)
    dtype = dtype_on(device)
    pairs = torch.randint(0, nodes, (2, edges), device=device)
    return GraphNet(width).to(device, dtype), (torch.randn(nodes, width, device=device, dtype=dtype), pairs)


def models(device: str) -> dict[str, Builder]:
    """Every model by name; on a GPU larger, in bfloat16."""
    large = ((64, 1024), (4096, 1024), (8192, 2048), (16384, 4096))
    sizes = large if device == "cuda" else ((64, 128), (512, 256), (2048, 256), (1024, 512))
    called = ((64, 1024), (8192, 2048)) if device == "cuda" else ((64, 128), (512, 256))
    return {
        **{f"mlp {r}x{w}": perceptron(r, w) for r, w in sizes},
        **{f"mlp with the op {r}x{w}": gelu_mlp(r, w) for r, w in called},
        "transformer with the op": transformer_block,
        "llama": language("llama"),
        "llama loss": language("llama", loss=True),
        "qwen": language("qwen"),
        "gemma": language("gemma"),
        "vit": vit,
        "bert": language("bert"),
        "t5": language("t5"),
        "mamba": language("mamba"),
        "conv net": convnet,
        "graph net": graphnet,
    }
