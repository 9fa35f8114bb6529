"""Cross entropy in plain torch: the meaning of the ops, and what serves where they do not."""

from __future__ import annotations

import torch
from torch.nn import functional as F

# As torch numbers them.
NONE, MEAN, SUM = 0, 1, 2


def reference(
    logits: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float,
    reduction: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Loss, lse of every row, and (2, ...): a row's maximum and the log of the sum relative to it."""
    below, log_sum, top = _relative(logits, softcap)
    lse = top + log_sum
    kept = target != ignore_index
    index = torch.where(kept, target, 0).long()
    picked = log_sum - below.gather(-1, index.unsqueeze(-1)).squeeze(-1)
    factor = torch.ones_like(lse) if weight is None else weight[index]
    loss = (1 - label_smoothing) * factor * picked
    if label_smoothing:
        others = log_sum.unsqueeze(-1) - below
        loss = loss + label_smoothing * (others if weight is None else weight * others).mean(-1)
    loss = torch.where(kept, loss, 0.0)
    drift = torch.where(kept, z_loss * lse * lse, 0.0)
    statistics = torch.stack([top, log_sum]).detach()
    if reduction == MEAN:
        count = kept.sum().to(loss.dtype)
        weights = count if weight is None else torch.where(kept, factor, 0.0).sum()
        return loss.sum() / weights + drift.sum() / count, lse, statistics
    loss = loss + drift
    return loss.sum() if reduction == SUM else loss, lse, statistics


def _relative(logits: torch.Tensor, softcap: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits as the loss sees them less their row's maximum, the log of the sum of exponentials, and the maximum."""
    x = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if softcap:
        x = softcap * torch.tanh(x / softcap)
    # A row of nothing but -infinity has lse -infinity, as torch.logsumexp has it.
    top = x.detach().amax(-1).clamp_min(torch.finfo(x.dtype).min)
    below = x - top.unsqueeze(-1)
    return below, below.exp().sum(-1).log(), top


def of_probabilities(
    logits: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    label_smoothing: float,
    z_loss: float,
    softcap: float,
    reduction: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss and lse for targets that are probabilities, (..., classes)."""
    if target.shape != logits.shape:
        raise RuntimeError(
            f"cross_entropy: target has shape {tuple(target.shape)}, expected that of logits, {tuple(logits.shape)}, "
            "for probabilities, or integers without the last dimension"
        )
    below, log_sum, top = _relative(logits, softcap)
    lse = top + log_sum
    flat = F.cross_entropy(
        (below - log_sum.unsqueeze(-1)).reshape(-1, logits.shape[-1]),
        target.to(below.dtype).reshape(-1, logits.shape[-1]),
        weight,
        reduction="none",
        label_smoothing=label_smoothing,
    )
    loss = flat.reshape(lse.shape) + z_loss * lse * lse
    return (loss.mean() if reduction == MEAN else loss.sum() if reduction == SUM else loss), lse
