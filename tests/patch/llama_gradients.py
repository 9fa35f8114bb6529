"""Gradients of a training step of transformers' Llama in bfloat16, with and without opgraft.patch, against float32.

    python tests/patch/llama_gradients.py [--device cuda] [--hidden 1024] [--layers 4] [--tokens 1024]

Prints the distance of every kind of parameter's gradient from float32's, relative to its size, and fails where the
patched step's is over 1.25 times that of transformers' own: what bfloat16 itself costs is the measure.
"""

from __future__ import annotations

import argparse
import sys

import torch
import transformers

import opgraft

ALLOWED = 1.25
ROUNDING = 2.0**-9  # of one bfloat16 number: below it a ratio says nothing


def build(given: argparse.Namespace, dtype: torch.dtype) -> torch.nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=given.vocabulary,
        hidden_size=given.hidden,
        intermediate_size=given.hidden * 11 // 4,
        num_hidden_layers=given.layers,
        num_attention_heads=max(given.hidden // 64, 1),
        num_key_value_heads=max(given.hidden // 128, 1),
    )
    return transformers.LlamaForCausalLM(config).to(device=given.device, dtype=dtype).train()


def step(model: torch.nn.Module, tokens: torch.Tensor) -> tuple[float, dict[str, torch.Tensor]]:
    labels = tokens.clone()
    labels[:, :3] = -100
    loss = model(input_ids=tokens, labels=labels).loss
    names, parameters = zip(*model.named_parameters(), strict=True)
    return loss.item(), dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))


def distances(found: dict[str, torch.Tensor], exact: dict[str, torch.Tensor]) -> dict[str, float]:
    """By kind of parameter, all layers together."""
    errors: dict[str, float] = {}
    sizes: dict[str, float] = {}
    for name, gradient in found.items():
        kind = ".".join(part for part in name.split(".") if not part.isdigit())
        errors[kind] = errors.get(kind, 0.0) + (gradient.float() - exact[name]).square().sum().item()
        sizes[kind] = sizes.get(kind, 0.0) + exact[name].square().sum().item()
    return {kind: (errors[kind] / sizes[kind]) ** 0.5 for kind in errors}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    for name, value in (("hidden", 1024), ("layers", 4), ("vocabulary", 32000), ("tokens", 1024)):
        parser.add_argument(f"--{name}", type=int, default=value)
    given = parser.parse_args()
    tokens = torch.randint(0, given.vocabulary, (2, given.tokens), generator=torch.Generator().manual_seed(1))
    tokens = tokens.to(given.device)
    exact_loss, exact = step(build(given, torch.float32), tokens)
    model = build(given, torch.bfloat16)
    own_loss, own = step(model, tokens)
    report = opgraft.patch(model)
    patched_loss, patched = step(model, tokens)
    print(f"{len(report.changes)} places patched; loss {exact_loss:.5f} in float32, {own_loss:.5f}, {patched_loss:.5f}")
    theirs, ours = distances(own, exact), distances(patched, exact)
    worst = 0.0
    for kind, distance in ours.items():
        ratio = distance / max(theirs[kind], ROUNDING)
        worst = max(worst, ratio)
        print(f"{kind:44} {theirs[kind]:.5f} {distance:.5f} {ratio:.2f}x")
    print(f"worst {worst:.2f}x of transformers' own distance, allowed {ALLOWED}x")
    return int(worst > ALLOWED or len(report.changes) < 2)


if __name__ == "__main__":
    sys.exit(main())
