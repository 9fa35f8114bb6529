"""What the rules of losses and of causal convolutions take for their op, and what they leave."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from stand_ins import all_ops  # noqa: F401

import opgraft
from opgraft.compile.find import find_sites
from opgraft.compile.rewrite import put_kernel

from idioms import BF16, check, sites_of
from models import captured

pytestmark = pytest.mark.usefixtures("all_ops")


def transformers_loss(logits: Any, labels: Any) -> Any:
    """As ForCausalLMLoss has it."""
    vocabulary = logits.shape[-1]
    logits = logits.float()
    labels = F.pad(labels, (0, 1), value=-100)[..., 1:].contiguous()
    return F.cross_entropy(logits.view(-1, vocabulary), labels.view(-1), ignore_index=-100, reduction="mean")


LOSSES = {
    "transformers": transformers_loss,
    "sum": lambda x, t: F.cross_entropy(x.view(-1, 11), t.view(-1), reduction="sum") / 3,
    "none": lambda x, t: F.cross_entropy(x.view(-1, 11), t.view(-1), reduction="none", label_smoothing=0.1),
    "nll": lambda x, t: F.nll_loss(F.log_softmax(x.view(-1, 11).float(), dim=-1), t.view(-1), ignore_index=3),
    "shifted logits": lambda x, t: F.cross_entropy(x[:, :-1].reshape(-1, 11).float(), t[:, 1:].reshape(-1)),
}


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_is_one_site(name: str, dtype: torch.dtype) -> None:
    logits, labels = torch.randn(2, 6, 11).to(dtype), torch.randint(0, 11, (2, 6))
    check(lambda x, t: LOSSES[name](x * 1, t), (logits, labels), "cross-entropy", tolerance=0.02)


@pytest.mark.parametrize(("wanted", "dtype"), [(True, BF16), (True, torch.float16), (False, BF16)])
def test_a_loss_on_a_cpu_makes_its_gradient_in_the_same_pass(wanted: bool, dtype: torch.dtype) -> None:
    """Where one is wanted, but not in float16, whose small gradients are lost before a loss scale."""
    logits, labels = torch.randn(2, 6, 11).to(dtype).requires_grad_(wanted), torch.randint(0, 11, (2, 6))
    module = captured(transformers_loss, logits, labels)
    (site,) = find_sites(module.graph)
    put_kernel(site)
    one_pass = torch.ops.opgraft.cross_entropy_with_gradient.default
    assert any(n.target is one_pass for n in module.graph.nodes) == (wanted and dtype != torch.float16)


OTHER_LOSSES = {
    "classes in the middle": lambda x, t: F.cross_entropy(x.transpose(1, 2), t),
    "probabilities": lambda x, t: F.cross_entropy(x.view(-1, 11), x.view(-1, 11).softmax(-1)),
}


@pytest.mark.parametrize("name", OTHER_LOSSES)
def test_another_loss_is_left_alone(name: str) -> None:
    assert sites_of(OTHER_LOSSES[name], (torch.randn(2, 6, 11), torch.randint(0, 11, (2, 6)))) == []


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_is_checked_against_float64(name: str) -> None:
    logits, labels = torch.randn(2, 6, 11), torch.randint(0, 11, (2, 6))
    (site,) = opgraft.sites(lambda x, t: LOSSES[name](x * 1, t), (logits, labels), choose="kernel")
    assert site.chosen, site.decision.why


# --- convolutions

CONVOLUTIONS = {
    "mamba": lambda x, w, b: F.silu(F.conv1d(x, w, b, padding=3, groups=8)[..., :12]),
    "cut by three slices": lambda x, w, b: F.silu(F.conv1d(x, w, b, padding=3, groups=8)[:, :, : x.shape[-1]]),
    "padded in front": lambda x, w, b: F.silu(F.conv1d(F.pad(x, (3, 0)), w, b, groups=8)),
    "no bias": lambda x, w, b: F.conv1d(F.pad(x, [3, 0]), w, groups=8),
    "sigmoid": lambda x, w, b: (y := F.conv1d(x, w, b, padding=(3,), groups=8)[..., :12]) * torch.sigmoid(y),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_a_causal_convolution_is_one_site(name: str) -> None:
    x, w, b = torch.randn(2, 8, 12), torch.randn(8, 1, 4), torch.randn(8)
    check(lambda x, w, b: CONVOLUTIONS[name](x * 2, w, b) + 1, (x, w, b), "causal-conv1d", tolerance=1e-4)


OTHER_CONVOLUTIONS = {
    "not causal": lambda x, w, b: F.conv1d(x, w, b, padding=3, groups=8)[..., 1:13],
    "padded behind": lambda x, w, b: F.conv1d(F.pad(x, (0, 3)), w, b, groups=8),
    "padded with ones": lambda x, w, b: F.conv1d(F.pad(x, (3, 0), value=1.0), w, b, groups=8),
    "reflected": lambda x, w, b: F.conv1d(F.pad(x, (3, 0), mode="reflect"), w, b, groups=8),
    "strided": lambda x, w, b: F.conv1d(F.pad(x, (3, 0)), w, b, groups=8, stride=2),
    "dilated": lambda x, w, b: F.conv1d(F.pad(x, (3, 0)), w, b, groups=8, dilation=2),
    "whole": lambda x, w, b: F.conv1d(x, w.expand(8, 8, 4), b, padding=3)[..., :12],
    "surplus is read": lambda x, w, b: (y := F.conv1d(x, w, b, padding=3, groups=8))[..., :12] + y.sum(),
}


@pytest.mark.parametrize("name", OTHER_CONVOLUTIONS)
def test_another_convolution_is_left_alone(name: str) -> None:
    inputs = (torch.randn(2, 8, 12), torch.randn(8, 1, 4), torch.randn(8))
    assert sites_of(OTHER_CONVOLUTIONS[name], inputs, "causal-conv1d") == []


def test_a_convolution_that_stays_a_cut_view_is_left_alone() -> None:
    """The op's result is dense, the view is not: what follows was traced with the view's strides."""
    inputs = (torch.randn(2, 8, 12), torch.randn(8, 1, 4), torch.randn(8))
    assert sites_of(lambda x, w, b: F.conv1d(x, w, b, padding=3, groups=8)[..., :12], inputs, "causal-conv1d") == []
