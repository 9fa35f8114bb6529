"""opgraft.patch on RMS norms: found by what they compute in models of any family, and what is none left alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import opgraft
from opgraft.patch.rms_norm import Meaning, meaning_of

transformers = pytest.importorskip("transformers")

SMALL = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "max_position_embeddings": 64,
}
FAMILIES = {
    "Llama": (0.0, True),
    "Mistral": (0.0, True),
    "Qwen3": (0.0, True),
    "Gemma2": (1.0, False),
    "Gemma3": (1.0, False),
}
every_family = pytest.mark.parametrize("family", FAMILIES)


def _model(family: str, dtype: torch.dtype = torch.float32) -> Any:
    name = "Gemma3ForCausalLM" if family == "Gemma3" else f"{family}ForCausalLM"
    config = getattr(transformers, "Gemma3TextConfig" if family == "Gemma3" else f"{family}Config")(**SMALL)
    torch.manual_seed(0)
    model = getattr(transformers, name)(config).to(dtype).train()
    with torch.no_grad():
        for module in model.modules():
            if type(module).__name__.endswith("RMSNorm"):
                module.weight.add_(torch.randn_like(module.weight) * 0.2)
    return model


def _norms(model: nn.Module) -> list[nn.Module]:
    return [m for m in model.modules() if type(m).__name__.endswith("RMSNorm")]


def _step(model: Any) -> tuple[torch.Tensor, list[torch.Tensor]]:
    tokens = torch.randint(3, 61, (2, 11), generator=torch.Generator().manual_seed(1))
    out = model(tokens, use_cache=False).logits
    used = [p for p in model.parameters() if p.requires_grad]
    return out.detach(), list(torch.autograd.grad(out.float().square().mean(), used))


@every_family
def test_every_norm_of_a_model_is_found_and_its_meaning_read(family: str) -> None:
    model = _model(family)
    offset, cast = FAMILIES[family]
    report = opgraft.patch(model)
    try:
        changed = [change for change in report.changes if change.replaced == ("forward",)]
        assert len(changed) == len(_norms(model)), str(report)
        assert all("forward" in vars(norm) for norm in _norms(model))
    finally:
        report.undo()
    assert not any("forward" in vars(norm) for norm in _norms(model))
    for norm in _norms(model):
        meaning = meaning_of(norm)
        assert meaning is not None
        assert (meaning.offset, meaning.cast_before_weight, meaning.eps) == (offset, cast, 1e-6)


@every_family
def test_a_training_step_is_the_same_and_undo_restores(family: str) -> None:
    model = _model(family)
    wanted = _step(model)
    report = opgraft.patch(model)
    try:
        found = _step(model)
    finally:
        report.undo()
    torch.testing.assert_close(found[0], wanted[0], rtol=1e-4, atol=1e-5)
    for got, want in zip(found[1], wanted[1], strict=True):
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-6)
    assert torch.equal(_step(model)[0], wanted[0])


@pytest.mark.parametrize("family", ["Llama", "Gemma2"])
def test_bfloat16_gradients_are_as_near_to_float32_as_the_original_s(family: str) -> None:
    model = _model(family, torch.bfloat16)
    exact = _step(_copied(model, torch.float32))
    own = _step(model)
    report = opgraft.patch(model)
    try:
        found = _step(model)
    finally:
        report.undo()
    for got, theirs, true in zip(found[1], own[1], exact[1], strict=True):
        scale = true.norm() + 1e-12
        assert (got.float() - true).norm() / scale <= 1.3 * (theirs.float() - true).norm() / scale + 1e-3


def _copied(model: Any, dtype: torch.dtype) -> Any:
    import copy

    return copy.deepcopy(model).to(dtype)


@pytest.mark.parametrize("family", ["Llama", "Gemma3"])
def test_one_graph_under_compile(family: str) -> None:
    model = _model(family)
    tokens = torch.randint(3, 61, (2, 11), generator=torch.Generator().manual_seed(1))
    wanted = model(tokens, use_cache=False).logits
    report = opgraft.patch(model)
    try:
        compiled = torch.compile(lambda t: model(t, use_cache=False).logits, fullgraph=True, backend="aot_eager")
        found = compiled(tokens)
    finally:
        report.undo()
        torch._dynamo.reset()
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


class Renamed(nn.Module):
    """An RMS norm that no name gives away."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(length))
        self.smallest = 1e-5

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        wide = tokens.float()
        return (wide / (wide.square().mean(-1, keepdim=True) + self.smallest).sqrt() * self.weight).to(tokens.dtype)


class LlamaRMSNorm(nn.Module):
    """Has the name and subtracts the mean."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(length))
        self.variance_epsilon = 1e-6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x - x.mean(-1, keepdim=True)
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon)


def test_what_counts_is_what_a_module_computes() -> None:
    assert meaning_of(Renamed(48)) == Meaning(True, 1e-5, 0.0, False, True)
    assert meaning_of(nn.RMSNorm(48, eps=1e-5)) is not None
    report = opgraft.patch(nn.Sequential(LlamaRMSNorm(48), nn.LayerNorm(48), nn.Linear(48, 48), nn.Dropout(0.01)))
    assert not report.changes


def test_a_patched_norm_calls_the_op() -> None:
    norm = Renamed(48)
    report = opgraft.patch(norm)
    try:
        with torch.profiler.profile() as seen:
            norm(torch.randn(3, 48))
    finally:
        report.undo()
    assert any(event.key == "opgraft::rms_norm" for event in seen.key_averages())
