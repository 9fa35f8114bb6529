"""opgraft.patch on the loss of transformers' language models, from configs with random weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import opgraft

transformers = pytest.importorskip("transformers")

SMALL = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FAMILIES = ("Llama", "Qwen3", "Mistral", "Gemma2")
every_family = pytest.mark.parametrize("family", FAMILIES)


def _model(family: str) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SMALL)
    return getattr(transformers, f"{family}ForCausalLM")(config).train()


def _batch() -> dict[str, torch.Tensor]:
    tokens = torch.randint(3, 61, (2, 11), generator=torch.Generator().manual_seed(1))
    labels = tokens.clone()
    labels[0, :4] = -100
    return {"input_ids": tokens, "labels": labels}


def _step(model: Any, **given: Any) -> tuple[torch.Tensor, list[torch.Tensor]]:
    loss = model(**_batch(), **given).loss
    used = [p for p in model.parameters() if p.requires_grad]
    return loss.detach(), list(torch.autograd.grad(loss, used))


@every_family
@pytest.mark.parametrize("given", [{}, {"num_items_in_batch": torch.tensor(9)}], ids=["mean", "items"])
def test_a_training_step_is_the_same_and_undo_restores(family: str, given: dict[str, Any]) -> None:
    model, untouched = _model(family), _model(family)
    wanted = _step(model, **given)
    original = model.loss_function
    report = opgraft.patch(model)
    assert any("_loss_function" in change.replaced for change in report.changes), str(report)
    found = _step(model, **given)
    assert untouched.loss_function is original, "another model of the class changed as well"
    report.undo()
    assert model.loss_function is original
    torch.testing.assert_close(found[0], wanted[0])
    for got, want in zip(found[1], wanted[1], strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)


def test_patching_twice_changes_the_loss_once() -> None:
    model = _model("Llama")
    first, second = opgraft.patch(model), opgraft.patch(model)
    assert not any("_loss_function" in change.replaced for change in second.changes)
    first.undo()


def test_one_graph_under_compile() -> None:
    model = _model("Llama")
    wanted = _step(model)
    report = opgraft.patch(model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    found = _step(compiled)
    report.undo()
    torch.testing.assert_close(found[0], wanted[0])
    for got, want in zip(found[1], wanted[1], strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)


def test_gradients_of_a_bfloat16_llama_step_are_those_of_float32_to_its_rounding() -> None:
    """Patched, no further from float32 than transformers' own bfloat16 step is."""
    exact = _step(_model("Llama"))
    own = _step(_model("Llama").bfloat16())
    model = _model("Llama").bfloat16()
    report = opgraft.patch(model)
    found = _step(model)
    report.undo()

    def distance(step: tuple[torch.Tensor, list[torch.Tensor]]) -> float:
        pairs = zip(step[1], exact[1], strict=True)
        return max(((g.float() - e).norm() / e.norm().clamp_min(1e-6)).item() for g, e in pairs)

    assert distance(found) <= 1.25 * distance(own)
    torch.testing.assert_close(found[0].float(), exact[0], rtol=1e-2, atol=1e-2)


def test_a_masked_language_model_is_served_too() -> None:
    torch.manual_seed(0)
    sizes = {k: v for k, v in SMALL.items() if k != "num_key_value_heads"}
    model = transformers.BertForMaskedLM(transformers.BertConfig(**sizes)).eval()
    if not isinstance(getattr(type(model), "loss_function", None), property):
        pytest.skip("this transformers has no loss_function to set")
    report = opgraft.patch(model)
    batch = _batch()
    function = model.loss_function
    logits = model(batch["input_ids"]).logits
    found = function(logits=logits, labels=batch["labels"], vocab_size=61) if report.changes else None
    report.undo()
    if found is not None:
        wanted = model.loss_function(logits=logits, labels=batch["labels"], vocab_size=61)
        torch.testing.assert_close(found, wanted)


def test_a_loss_that_computes_something_else_is_left_alone_by_name() -> None:
    model = _model("Llama")

    def focal(logits: torch.Tensor, labels: torch.Tensor, vocab_size: int, **kwargs: Any) -> torch.Tensor:
        each = torch.nn.functional.cross_entropy(logits.reshape(-1, vocab_size), labels.reshape(-1), reduction="none")
        return (each * (1 - (-each).exp()) ** 2).mean()

    model.loss_function = focal
    report = opgraft.patch(model)
    report.undo()
    assert any("results differ" in reason for reason in report.left_alone.values()), str(report)
    assert model.loss_function is focal
