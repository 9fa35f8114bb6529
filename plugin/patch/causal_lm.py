"""The loss of transformers' language models: ForCausalLMLoss and ForMaskedLMLoss, and whatever computes the same.

transformers copies the logits to float32 before ``torch.nn.functional.cross_entropy``, which takes twice their memory,
and its backward makes two more tensors of that size. A model asks its ``loss_function`` for the loss: this one's is
changed, other models keep theirs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from opgraft.ops.cross_entropy import cross_entropy
from opgraft.patch.change import Swap

_DEVICES = ("cpu", "cuda")
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_WANTED = {"logits", "labels", "vocab_size"}
_CLASSES = 17
_ROUNDINGS = 64 * torch.finfo(torch.float32).eps


def swaps(module: nn.Module) -> list[Swap]:
    """The swap for a model that takes labels, and whose ``loss_function`` can be set and takes logits and labels."""
    settable = isinstance(getattr(type(module), "loss_function", None), property)
    if not settable or "labels" not in _parameters(type(module).forward):
        return []
    original = module.loss_function
    if not callable(original) or hasattr(original, "replaces") or not _parameters(original) >= _WANTED:
        return []
    # Whether labels are shifted shows in what it computes.
    candidates = [_loss(original, shifted) for shifted in (True, False)]
    differences = [_difference(original, candidate) for candidate in candidates]
    best = differences.index(min(differences))
    check = (differences[best], _ROUNDINGS)
    return [Swap(module, "_loss_function", lambda _: candidates[best], check=lambda: check)]


def _parameters(function: Callable[..., Any]) -> set[str]:
    try:
        return set(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return set()


def _loss(original: Callable[..., Any], shifted: bool) -> Callable[..., Any]:
    def loss_function(
        logits: torch.Tensor,
        labels: torch.Tensor,
        vocab_size: int,
        num_items_in_batch: Any = None,
        ignore_index: int = -100,
        shift_labels: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        target = labels if shift_labels is None else shift_labels
        fits = (
            logits.dtype in _DTYPES
            and logits.device.type in _DEVICES
            and logits.shape[-1] == vocab_size
            and target is not None
            and target.dtype == torch.int64
            and target.numel() * vocab_size == logits.numel()
            and (shifted or shift_labels is None)
        )
        if not fits:
            if shift_labels is not None:
                kwargs = {**kwargs, "shift_labels": shift_labels}
            kwargs = {**kwargs, "num_items_in_batch": num_items_in_batch, "ignore_index": ignore_index}
            found: torch.Tensor = original(logits=logits, labels=labels, vocab_size=vocab_size, **kwargs)
            return found
        if shifted and shift_labels is None:
            # Position t predicts t + 1; the last one predicts nothing.
            target = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        target = target.to(logits.device).reshape(logits.shape[:-1])
        reduction = "mean" if num_items_in_batch is None else "sum"
        loss = cross_entropy(logits, target, ignore_index=ignore_index, reduction=reduction)
        assert isinstance(loss, torch.Tensor)
        if num_items_in_batch is None:
            return loss
        items = num_items_in_batch
        return loss / (items.to(loss.device) if isinstance(items, torch.Tensor) else items)

    loss_function.replaces = original  # type: ignore[attr-defined]
    return loss_function


def _difference(original: Callable[..., Any], candidate: Callable[..., Any]) -> float:
    """Largest difference of loss and gradient over their largest value, over the ways in which a model calls it."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 6, _CLASSES, generator=generator)
    labels = torch.randint(0, _CLASSES, (2, 6), generator=generator)
    labels[0, 1], labels[1, 3] = -100, 3
    other = labels.clamp_min(0)
    ways: list[dict[str, Any]] = [{}, {"num_items_in_batch": torch.tensor(7)}, {"ignore_index": 3, "labels": other}]
    if "shift_labels" in _parameters(original):
        ways.append({"shift_labels": labels})
    worst = 0.0
    for way in ways:
        runs = []
        for function in (original, candidate):
            made = logits.clone().requires_grad_()
            try:
                with torch.enable_grad():
                    loss = function(**{"logits": made, "labels": labels, "vocab_size": _CLASSES, **way})
                    runs.append((loss.detach(), torch.autograd.grad(loss, made)[0]))
            except (RuntimeError, TypeError, ValueError, IndexError, AttributeError):
                return float("inf")
        for old, new in zip(*runs, strict=True):
            apart = ((old - new).abs().max() / old.abs().max().clamp_min(1e-6)).item()
            worst = max(worst, apart if apart == apart else float("inf"))
    return worst
