"""Records of opgraft's ops that write an argument: ``opgraft doctor --import tests/conform/own.py 'opgraft::*_'``.

The functional twin of each gives the calls and the meaning. They have no record in the package, whose table is of ops
that a compiler may choose between.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

import opgraft  # noqa: F401 - registers the ops
from opgraft.ops import causal_conv1d_update, cross_entropy, cross_entropy_backward, selective_scan_update
from opgraft.ops.cross_entropy_reference import NONE
from opgraft.registry import Sample, describe


def _rescale(gradient: torch.Tensor, grad_loss: torch.Tensor, *others: Any) -> None:
    logits, target, weight, statistics, *options = others
    made = cross_entropy_backward.reference_backward(logits, target, weight, statistics, grad_loss, None, *options)
    gradient.copy_(made)


def _rescale_samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    for index, sample in enumerate(cross_entropy.samples(device, dtype)):
        logits, target, weight, *options = sample.args
        if options[-1] == NONE:
            continue
        loss, _, statistics = cross_entropy.reference(*sample.args)
        one = torch.ones_like(loss.detach())
        gradient = cross_entropy_backward.reference_backward(logits, target, weight, statistics, one, None, *options)
        grad_loss = one if index % 2 else one * 0.5
        yield Sample(sample.name, (gradient.detach(), grad_loss, logits, target, weight, statistics.detach(), *options))


describe(
    "opgraft::cross_entropy_rescale_",
    _rescale,
    samples=_rescale_samples,
    derived=("gradient", "statistics"),
    owner="opgraft",
)


def _convolve(x: torch.Tensor, state: torch.Tensor, *others: Any) -> torch.Tensor:
    out, after = causal_conv1d_update.reference(x, state, *others)
    state.copy_(after)
    return out


describe("opgraft::causal_conv1d_update_", _convolve, samples=causal_conv1d_update.samples, owner="opgraft")


def _scan(state: torch.Tensor, *others: Any) -> torch.Tensor:
    out, after = selective_scan_update.reference(state, *others)
    state.copy_(after)
    return out


describe("opgraft::selective_scan_update_", _scan, samples=selective_scan_update.samples, owner="opgraft")
