"""The doctor leaves the process that calls it as it was."""

from __future__ import annotations

import pytest
import torch

import tests.conform.ops  # noqa: F401
from opgraft import diagnostics as dx


def state() -> tuple[object, ...]:
    return (
        torch.get_rng_state().sum().item(),
        torch.get_default_dtype(),
        torch.get_default_device(),
        torch.is_grad_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_num_threads(),
        torch.is_autocast_enabled("cpu"),
    )


def test_nothing_changes_in_the_calling_process() -> None:
    torch.manual_seed(7)
    samples = [(torch.randn(3, 4),)]
    before = state()
    report = dx.doctor(torch.ops.faulty.noisy.default, samples, seconds=4.0)
    assert state() == before
    assert "unstable-result" in {finding.kind for finding in report.findings}


def test_a_call_that_is_no_op_is_refused_in_words() -> None:
    with pytest.raises(TypeError, match="expected an op"):
        dx.doctor(len)
