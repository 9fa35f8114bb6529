"""Published kernels for the ops over rows, called with the ops' own arguments: Liger's and quack's, where installed.

Both are wheels: liger-kernel, and quack-kernels with nvidia-cutlass-dsl[cu13] (quack needs a GPU of Hopper's kind or
newer, and compiles its kernels on their first call).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

EPS = 1e-6
IGNORED = -100


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except (ImportError, OSError):
        return None


def norms(op: str) -> dict[str, Callable[..., Any]]:
    """By package: what takes (x, weight) for rms_norm, (x, residual, weight) for add_rms_norm; differentiable."""
    found: dict[str, Callable[..., Any]] = {}
    file, function = {
        "rms_norm": ("rms_norm", "LigerRMSNormFunction"),
        "add_rms_norm": ("fused_add_rms_norm", "LigerFusedAddRMSNormFunction"),
    }.get(op, ("", ""))
    liger = _module(f"liger_kernel.ops.{file}") if file else None
    if liger is not None:
        apply = getattr(liger, function).apply
        found["Liger"] = lambda *args: apply(*args, EPS, 0.0, "llama", False)
    quack = _module("quack.rmsnorm") if file else None
    if quack is not None:
        if op == "rms_norm":
            found["quack"] = lambda x, weight: quack.rmsnorm(x, weight, eps=EPS)
        else:
            found["quack"] = lambda x, residual, weight: quack.rmsnorm(
                x, weight, residual=residual, eps=EPS, prenorm=True
            )
    return found


@dataclass(frozen=True)
class LossPeer:
    """One published cross entropy, mean over rows.

    Attributes:
        forward: from logits and target to the loss, or to the losses of rows.
        both: to the loss and the gradient of the logits.
        rows: losses and gradients are those of a sum over rows.
        in_place: ``both`` writes the gradient over the logits.
    """

    forward: Callable[..., Any]
    both: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    rows: bool = False
    in_place: bool = False


def losses() -> dict[str, LossPeer]:
    found: dict[str, LossPeer] = {}
    liger = _module("liger_kernel.ops.cross_entropy")
    if liger is not None:
        # The kernel's own call: its autograd function would also ask, on the host, whether what comes in is one.
        def in_place(logits: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            out = liger.cross_entropy_forward(logits, target, None, IGNORED, 0.0, 0.0, "mean", None, False)
            return out[0], out[-1]

        found["Liger, in place"] = LossPeer(
            lambda logits, target: in_place(logits.detach(), target)[0], in_place, False, True
        )
    quack = _module("quack.cross_entropy")
    if quack is not None:

        def autograd(logits: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            loss = quack.cross_entropy(logits, target, ignore_index=IGNORED, reduction="mean")
            return loss.detach(), torch.autograd.grad(loss, logits)[0]

        def one_pass(logits: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            loss, gradient = quack.cross_entropy_fwd(logits, target, ignore_index=IGNORED, return_dx=True)
            return loss, gradient

        def rows(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = quack.cross_entropy_fwd(logits, target, ignore_index=IGNORED)
            return out

        found["quack"] = LossPeer(rows, autograd)
        found["quack, one pass"] = LossPeer(rows, one_pass, rows=True)
    return found
