"""What the rules of norms and of float8 outputs take for their op, and what they leave."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from stand_ins import all_ops  # noqa: F401

import opgraft

from idioms import BF16, check, sites_of

pytestmark = pytest.mark.usefixtures("all_ops")


def llama(x: Any, w: Any, eps: float = 1e-6) -> Any:
    dtype = x.dtype
    h = x.to(torch.float32)
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)
    return w * h.to(dtype)


def gemma(x: Any, w: Any) -> Any:
    h = x.float()
    out = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)
    return (out * (1.0 + w.float())).type_as(x)


def gemma3n(x: Any, w: Any) -> Any:
    h = x.float()
    return (h * torch.pow(h.pow(2).mean(-1, keepdim=True) + 1e-6, -0.5) * w.float()).type_as(x)


def t5(x: Any, w: Any) -> Any:
    h = x * torch.rsqrt(x.to(torch.float32).pow(2).mean(-1, keepdim=True) + 1e-6)
    return w * (h.to(w.dtype) if w.dtype in (torch.float16, BF16) else h)


def by_division(x: Any, w: Any) -> Any:
    return x / torch.sqrt(torch.mean(x * x, dim=-1, keepdim=True) + 1e-5) * w


def by_a_sum(x: Any, w: Any) -> Any:
    return torch.rsqrt(1e-5 + (x**2).sum(dim=(-1,), keepdim=True) / x.shape[-1]) * x * w


NORMS = {
    "llama": llama,
    "gemma": gemma,
    "gemma3n": gemma3n,
    "t5": t5,
    "by a division": by_division,
    "by a sum": by_a_sum,
    "called": lambda x, w: F.rms_norm(x, (x.shape[-1],), w, 1e-6),
    "no weight": lambda x, w: x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6),
}


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("name", NORMS)
def test_a_norm_is_one_site(name: str, dtype: torch.dtype) -> None:
    x, w = torch.randn(3, 5, 16).to(dtype), torch.rand(16).to(dtype)
    check(
        lambda x, w: NORMS[name](x * 2, w) + 1, (x, w), "rms-norm", tolerance=1e-5 if dtype == torch.float32 else 0.05
    )


@pytest.mark.parametrize("name", ["llama", "gemma", "t5"])
def test_a_norm_of_a_sum_gives_the_sum_too(name: str) -> None:
    def function(x: Any, r: Any, w: Any) -> Any:
        summed = r + x
        return NORMS[name](summed, w) * 2, summed - 1

    check(function, (torch.randn(3, 16), torch.randn(3, 16), torch.rand(16)), "add-rms-norm")


OTHER_NORMS = {
    "mean of x": lambda x, w: x * torch.rsqrt(x.mean(-1, keepdim=True) + 1e-6) * w,
    "another axis": lambda x, w: x * torch.rsqrt(x.square().mean(0, keepdim=True) + 1e-6) * w,
    "another x": lambda x, w: x.flip(0) * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * w,
    "cube": lambda x, w: x * torch.rsqrt(x.pow(3).mean(-1, keepdim=True) + 1e-6) * w,
    "the root is read": lambda x, w: (r := torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)) + x * r * w,
    "layer norm": lambda x, w: F.layer_norm(x, (16,), w),
    "a sum over another length": lambda x, w: x * torch.rsqrt(x.square().sum(-1, keepdim=True) / 15 + 1e-6) * w,
}


@pytest.mark.parametrize("name", OTHER_NORMS)
def test_what_is_no_such_norm_is_left_alone(name: str) -> None:
    assert sites_of(OTHER_NORMS[name], (torch.randn(16, 16), torch.rand(16))) == []


def test_a_norm_whose_statistics_have_no_gradient_is_left_alone() -> None:
    def function(x: Any, w: Any) -> Any:
        with torch.no_grad():
            r = torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
        return x * r * w

    assert sites_of(function, (torch.randn(4, 16, requires_grad=True), torch.rand(16))) == []


def test_a_write_inside_a_norm_ends_the_match() -> None:
    def function(x: Any, w: Any) -> Any:
        x = x * 1
        r = torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
        x.mul_(2)
        return x * r * w

    assert sites_of(function, (torch.randn(4, 16), torch.rand(16))) == []


@pytest.mark.parametrize("name", ["llama", "gemma", "t5"])
def test_a_norm_of_a_sum_is_checked_against_float64(name: str) -> None:
    def function(x: Any, r: Any, w: Any) -> Any:
        summed = x + r
        return NORMS[name](summed, w) * 2, summed - 1

    found = opgraft.sites(function, (torch.randn(3, 16), torch.randn(3, 16), torch.rand(16)), choose="kernel")
    assert [(s.idiom, s.chosen) for s in found] == [("add-rms-norm", True)], [str(s) for s in found]


# --- float8 outputs


def quantised(v: Any) -> Any:
    scale = v.abs().amax(dim=-1, keepdim=True).float() / 448.0
    return (v.float() / scale).clamp(-448.0, 448.0).to(torch.float8_e4m3fn), scale


def with_a_least_scale(v: Any) -> Any:
    scale = (v.float().abs().amax(-1, True) * (1 / 448.0)).clamp(min=1e-12)
    return (v * scale.reciprocal()).to(torch.float8_e4m3fn), scale


def in_blocks(v: Any) -> Any:
    parts = v.float().view(*v.shape[:-1], -1, 128)
    scale = parts.abs().amax(-1, keepdim=True).clamp(1e-4) / 448.0
    return (parts / scale).clamp(-448, 448).to(torch.float8_e4m3fn).view(v.shape), scale


QUANTISED = {"row": quantised, "least scale": with_a_least_scale, "blocks": in_blocks}


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("how", QUANTISED)
def test_a_gate_quantised_is_one_site(how: str, dtype: torch.dtype) -> None:
    def function(g: Any, u: Any) -> Any:
        return QUANTISED[how](F.silu(g) * u)

    check(function, (torch.randn(4, 256).to(dtype), torch.randn(4, 256).to(dtype)), "silu-mul-fp8", tolerance=0.15)


@pytest.mark.parametrize("how", QUANTISED)
def test_a_norm_quantised_is_one_site(how: str) -> None:
    inputs = (torch.randn(4, 256), torch.rand(256))
    check(lambda x, w: QUANTISED[how](llama(x, w)), inputs, "rms-norm-fp8", tolerance=0.15)


def test_a_norm_of_a_sum_quantised() -> None:
    def function(x: Any, r: Any, w: Any) -> Any:
        summed = x + r
        return (*quantised(gemma(summed, w)), summed)

    inputs = (torch.randn(4, 64), torch.randn(4, 64), torch.rand(64))
    check(function, inputs, "add-rms-norm-fp8", tolerance=0.15)


def test_a_quantised_gate_is_left_alone_where_a_gradient_is_wanted() -> None:
    inputs = (torch.randn(4, 64, requires_grad=True), torch.randn(4, 64))
    assert sites_of(lambda g, u: quantised(F.silu(g) * u), inputs, "silu-mul-fp8") == []


OTHER_SCALES = {
    "largest of all": lambda v: (v / (v.abs().max() / 448)).to(torch.float8_e4m3fn),
    "another largest": lambda v: (v / (v.abs().amax(-1, keepdim=True) / 240)).to(torch.float8_e4m3fn),
    "largest, not magnitude": lambda v: (v / (v.amax(-1, keepdim=True) / 448)).to(torch.float8_e4m3fn),
    "another axis": lambda v: (v / (v.abs().amax(0, keepdim=True) / 448)).to(torch.float8_e4m3fn),
    "a large least scale": lambda v: (v / (v.abs().amax(-1, keepdim=True) / 448).clamp(1.0)).to(torch.float8_e4m3fn),
    "another type": lambda v: (v / (v.abs().amax(-1, keepdim=True) / 448)).to(torch.float8_e5m2),
}


@pytest.mark.parametrize("name", OTHER_SCALES)
def test_another_scale_is_left_alone(name: str) -> None:
    inputs = (torch.randn(4, 64), torch.randn(4, 64))
    assert sites_of(lambda g, u: OTHER_SCALES[name](F.silu(g) * u), inputs, "silu-mul-fp8") == []
