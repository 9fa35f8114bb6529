"""Ops that a rule serves, as plain torch, for a build that lacks them: what a rule matches does not need a kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import opgraft
from opgraft import registry

NORM = "Tensor? weight=None, float eps=1e-06, float offset=0.0, bool cast_before_weight=False"
FP8 = "int block=0, float? scale_upper_bound=None, bool power_of_two=False"


def rms_norm(x: Any, weight: Any = None, eps: float = 1e-6, offset: float = 0.0, rounded: bool = False) -> Any:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    normal = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    normal = normal.to(x.dtype).to(wide.dtype) if rounded else normal
    normal = normal if weight is None else normal * (weight.to(wide.dtype) + offset)
    return normal.to(x.dtype).contiguous()


def add_rms_norm(x: Any, residual: Any, *rest: Any) -> Any:
    summed = (x + residual).contiguous()
    return rms_norm(summed, *rest), summed


def codes_and_scales(value: Any, block: int = 0, bound: Any = None, power_of_two: bool = False) -> Any:
    value = value.float()
    parts = value.unflatten(-1, (-1, block)) if block else value.unsqueeze(-2)
    scale = (parts.abs().amax(-1, keepdim=True) / 448.0).clamp_min(1.0 / (448.0 * 512.0))
    codes = (parts / scale).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
    return codes.reshape(value.shape), scale.squeeze(-1).contiguous()


def rms_norm_fp8(
    x: Any, weight: Any = None, eps: float = 1e-6, offset: float = 0.0, rounded: bool = False, *o: Any
) -> Any:
    return codes_and_scales(rms_norm(x.float(), weight, eps, offset), *o)


def add_rms_norm_fp8(x: Any, residual: Any, *rest: Any) -> Any:
    summed = (x + residual).contiguous()
    return (*rms_norm_fp8(summed, *rest), summed)


def silu_mul_fp8(gate: Any, up: Any, *o: Any) -> Any:
    return codes_and_scales(F.silu(gate.float()) * up.float(), *o)


def cross_entropy(logits: Any, target: Any, weight: Any, ignored: int, smoothing: float, *options: Any) -> Any:
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32)).flatten(0, -2)
    settings = {"ignore_index": ignored, "label_smoothing": smoothing, "reduction": ("none", "mean", "sum")[options[2]]}
    loss = F.cross_entropy(wide, target.flatten(), weight, **settings)
    return loss.clone(), torch.logsumexp(wide, -1), wide.amax(-1)


def gelu_erf(x: Any) -> Any:
    return F.gelu(x).contiguous()


OPS: dict[str, tuple[str, Callable[..., Any]]] = {
    "gelu_erf": ("(Tensor x) -> Tensor", gelu_erf),
    "rms_norm": (f"(Tensor x, {NORM}) -> Tensor", rms_norm),
    "add_rms_norm": (f"(Tensor x, Tensor residual, {NORM}) -> (Tensor, Tensor)", add_rms_norm),
    "rms_norm_fp8": (f"(Tensor x, {NORM}, {FP8}) -> (Tensor, Tensor)", rms_norm_fp8),
    "add_rms_norm_fp8": (
        f"(Tensor x, Tensor residual, {NORM}, {FP8}) -> (Tensor, Tensor, Tensor)",
        add_rms_norm_fp8,
    ),
    "silu_mul_fp8": (f"(Tensor gate, Tensor up, {FP8}) -> (Tensor, Tensor)", silu_mul_fp8),
    "cross_entropy": (
        "(Tensor logits, Tensor target, Tensor? weight, int ignore_index, float label_smoothing, float z_loss, "
        "float softcap, int reduction) -> (Tensor, Tensor, Tensor)",
        cross_entropy,
    ),
}


@pytest.fixture(scope="module")
def all_ops() -> Iterator[None]:
    """Every op that a rule can serve is in the table: the package's own where it has it, else a stand-in."""
    missing = [name for name in OPS if registry.find(f"opgraft::{name}") is None]
    with torch.library._scoped_library("opgraft", "FRAGMENT") as library:
        for name in missing:
            schema, meaning = OPS[name]
            library.define(name + schema)
            library.impl(name, meaning, "CompositeExplicitAutograd")
            torch.library.register_fake(f"opgraft::{name}", meaning, lib=library)
            opgraft.describe(f"opgraft::{name}", meaning)
        yield
        for name in missing:
            registry._TABLE.pop(f"opgraft::{name}", None)
