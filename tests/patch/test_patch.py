"""opgraft.patch on models from transformers' configs with random weights: same values, gradients and decoding."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import opgraft

transformers = pytest.importorskip("transformers")

SMALL = {
    "vocab_size": 61,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def _mamba() -> Any:
    return transformers.MambaForCausalLM(transformers.MambaConfig(**SMALL, state_size=8))


def _falcon_mamba() -> Any:
    return transformers.FalconMambaForCausalLM(transformers.FalconMambaConfig(**SMALL, state_size=8))


def _jamba() -> Any:
    config = transformers.JambaConfig(
        **SMALL,
        intermediate_size=48,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_experts=2,
        mamba_d_state=8,
        mamba_dt_rank=4,
        attn_layer_period=2,
        attn_layer_offset=1,
        use_mamba_kernels=False,
    )
    return transformers.JambaForCausalLM(config)


def _recurrent_gemma() -> Any:
    config = transformers.RecurrentGemmaConfig(
        **{**SMALL, "num_hidden_layers": 3},
        intermediate_size=48,
        num_attention_heads=4,
        lru_width=32,
        attention_window_size=16,
    )
    return transformers.RecurrentGemmaForCausalLM(config)


MODELS = pytest.mark.parametrize(
    "build", [_mamba, _falcon_mamba, _jamba, _recurrent_gemma], ids=lambda f: f.__name__[1:]
)


def _tokens() -> torch.Tensor:
    return torch.randint(3, 61, (2, 11), generator=torch.Generator().manual_seed(1))


def _step(model: Any) -> tuple[torch.Tensor, list[torch.Tensor]]:
    out = model(_tokens(), use_cache=False).logits
    used = [p for p in model.parameters() if p.requires_grad]
    grads = torch.autograd.grad(out.square().mean(), used, allow_unused=True)
    return out.detach(), [g for g in grads if g is not None]


@MODELS
def test_training_step_is_the_same_and_undo_restores(build: Any) -> None:
    torch.manual_seed(0)
    model = build().train()
    wanted = _step(model)
    report = opgraft.patch(model)
    try:
        assert report.changes, str(report)
        found = _step(model)
    finally:
        report.undo()
    torch.testing.assert_close(found[0], wanted[0], rtol=1e-4, atol=1e-5)
    for got, want in zip(found[1], wanted[1], strict=True):
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-6)
    again = _step(model)
    assert torch.equal(again[0], wanted[0])


@MODELS
def test_decoding_with_a_cache_is_the_same(build: Any) -> None:
    torch.manual_seed(0)
    model = build().eval()

    def decode() -> torch.Tensor:
        found: torch.Tensor = model.generate(_tokens(), max_new_tokens=6, do_sample=False)
        return found

    wanted = decode()
    report = opgraft.patch(model)
    try:
        found = decode()
    finally:
        report.undo()
    assert torch.equal(found, wanted)


def test_one_graph_under_compile() -> None:
    torch.manual_seed(0)
    model = _mamba().train()
    wanted = _step(model)[0]
    report = opgraft.patch(model)
    try:
        compiled = torch.compile(lambda t: model(t, use_cache=False).logits, fullgraph=True, backend="aot_eager")
        found = compiled(_tokens())
    finally:
        report.undo()
        torch._dynamo.reset()
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def test_a_compiled_mixer_leaves_the_scan_nothing_to_copy() -> None:
    """What the scan would have to make dense, a compiler does in the kernels around it."""
    model = _mamba().train()
    report = opgraft.patch(model)
    try:
        compiled = torch.compile(model, fullgraph=True)
        _step(compiled)
        with torch.profiler.profile() as profile:
            _step(compiled)
    finally:
        report.undo()
        torch._dynamo.reset()
    scans = [event for event in profile.events() if event.name.startswith("opgraft::selective_scan")]
    assert {event.name for event in scans} == {"opgraft::selective_scan", "opgraft::selective_scan_backward"}
    for event in scans:
        assert not [inner.name for inner in event.cpu_children if inner.name in ("aten::contiguous", "aten::copy_")]


def test_the_shortcut_that_transformers_takes_in_training_is_taken_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """With mamba_ssm installed, a mixer in training is one call of its kernel, past all that the ops replace."""
    from transformers.models.mamba import modeling_mamba

    calls = []
    monkeypatch.setattr(modeling_mamba, "mamba_inner_fn", lambda *args, **kwargs: calls.append(1))
    model = _mamba()
    _step(model)
    assert calls
    report = opgraft.patch(model)
    calls.clear()
    _step(model)
    assert not calls
    report.undo()
    _step(model)
    assert calls


def test_an_unknown_model_is_left_alone_and_named() -> None:
    report = opgraft.patch(torch.nn.Linear(3, 3))
    assert not report.changes
    assert report.left_alone == {"Linear": "no module of a known family in it"}
