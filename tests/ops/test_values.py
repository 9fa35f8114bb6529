"""Values and gradients against float64, over every sample, dtype and device."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from opgraft.registry import OpSpec, Sample

from table import (
    assert_as_exact_as_reference,
    calls,
    differentiable,
    differentiable_op,
    every_dtype,
    every_op,
    same_bits,
    same_layout,
    tensors,
    to_double,
)

pytestmark = pytest.mark.core


@every_op
@every_dtype
def test_values_are_as_exact_as_the_reference(spec: OpSpec, dtype: torch.dtype, device: torch.device) -> None:
    for sample in calls(spec, device, dtype):
        found = spec.op(*sample.args, **sample.kwargs)
        own = spec.reference(*sample.args, **sample.kwargs)
        exact = spec.reference(*to_double(sample.args), **to_double(sample.kwargs))
        assert_as_exact_as_reference(spec, found, own, exact, f"{sample.name} in {dtype}")


@every_op
def test_the_same_call_gives_the_same_bits_and_leaves_its_inputs_alone(spec: OpSpec, device: torch.device) -> None:
    for sample in calls(spec, device):
        before = [tensor.clone() for tensor in tensors((sample.args, sample.kwargs))]
        first = tensors(spec.op(*sample.args, **sample.kwargs))
        second = tensors(spec.op(*sample.args, **sample.kwargs))
        for one, other in zip(first, second, strict=True):
            assert same_bits(one, other), sample.name
            assert one.data_ptr() != other.data_ptr() or not one.numel(), f"{sample.name}: outputs share memory"
        for tensor, copy in zip(tensors((sample.args, sample.kwargs)), before, strict=True):
            assert same_bits(tensor, copy), f"{sample.name}: an input was written"


def _outputs_and_gradients(function: Any, sample: Sample, cotangents: list[torch.Tensor]) -> list[torch.Tensor]:
    args, kwargs = differentiable(sample.args), differentiable(sample.kwargs)
    outputs = [out for out in tensors(function(*args, **kwargs)) if out.requires_grad]
    wanted = [t for t in tensors((args, kwargs)) if t.requires_grad]
    grads = torch.autograd.grad(outputs, wanted, cotangents[: len(outputs)], allow_unused=True)
    return [torch.zeros_like(t) if g is None else g for g, t in zip(grads, wanted, strict=True)]


def _cotangents(outputs: list[torch.Tensor], form: str) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    made = []
    for out in outputs:
        drawn = torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out.device, out.dtype)
        if form == "expanded":
            drawn = drawn.reshape(-1)[:1].reshape([1] * out.dim()).expand(out.shape) if out.numel() else drawn
        elif form == "transposed" and out.dim() >= 2:
            drawn = drawn.transpose(0, -1).contiguous().transpose(0, -1)
        made.append(drawn)
    return made


@differentiable_op
@every_dtype
@pytest.mark.parametrize("form", ["dense", "expanded", "transposed"])
def test_gradients_are_as_exact_as_the_reference(
    spec: OpSpec, dtype: torch.dtype, form: str, device: torch.device
) -> None:
    function = spec.public or spec.op
    for sample in calls(spec, device, dtype):
        doubled = Sample(sample.name, to_double(sample.args), to_double(sample.kwargs))
        cotangents = _cotangents(tensors(spec.reference(*sample.args, **sample.kwargs)), form)
        found = _outputs_and_gradients(function, sample, cotangents)
        own = _outputs_and_gradients(spec.reference, sample, cotangents)
        exact = _outputs_and_gradients(spec.reference, doubled, to_double(cotangents))
        assert_as_exact_as_reference(spec, found, own, exact, f"gradient of {sample.name}, {form}, in {dtype}")


@differentiable_op
def test_gradcheck_and_gradgradcheck_in_double(spec: OpSpec, device: torch.device) -> None:
    function = spec.public or spec.op
    checked = 0
    for sample in calls(spec, device, torch.float64):
        sizes = [t.numel() for t in tensors((sample.args, sample.kwargs))]
        if max(sizes) > 200 or min(sizes) == 0 or sample.name in ("edge values", "not a number"):
            continue
        inputs = differentiable(same_layout(sample.args))

        def call(*args: Any, kwargs: dict[str, Any] = sample.kwargs) -> Any:
            return function(*args, **kwargs)

        assert torch.autograd.gradcheck(call, inputs, fast_mode=sizes[0] > 60), sample.name
        assert torch.autograd.gradgradcheck(call, inputs, fast_mode=True), sample.name
        checked += 1
    assert checked >= 3, f"{spec.name} has too few small samples"


@differentiable_op
def test_only_the_gradients_that_are_asked_for_are_given(spec: OpSpec, device: torch.device) -> None:
    function = spec.public or spec.op
    sample = calls(spec, device)[0]
    places = [i for i, value in enumerate(sample.args) if isinstance(value, torch.Tensor)]
    floating = [i for i in places if sample.args[i].is_floating_point()]
    for wanted in floating:
        args = [v.detach().clone() if isinstance(v, torch.Tensor) else v for v in sample.args]
        args[wanted].requires_grad_()
        outputs = [out for out in tensors(function(*args, **sample.kwargs)) if out.requires_grad]
        torch.autograd.backward([out.double().sum() for out in outputs])
        for index, value in enumerate(args):
            if isinstance(value, torch.Tensor):
                assert (value.grad is not None) == (index == wanted), f"gradient of {wanted} asked for, {index} given"


@differentiable_op
def test_forward_mode_is_not_dropped(spec: OpSpec, device: torch.device) -> None:
    """torch's own autograd kernel for registered ops returns a zero tangent; the public function must not."""
    assert spec.public is not None
    sample = next(s for s in calls(spec, device, torch.float64) if s.name == "dense")
    floating = [i for i, v in enumerate(sample.args) if isinstance(v, torch.Tensor) and v.is_floating_point()]

    def at(function: Any, *moving: torch.Tensor) -> Any:
        args = list(sample.args)
        for index, value in zip(floating, moving, strict=True):
            args[index] = value
        return function(*args, **sample.kwargs)

    values = tuple(sample.args[i] for i in floating)
    tangents = tuple(torch.ones_like(v) for v in values)
    _, found = torch.func.jvp(lambda *v: at(spec.public, *v), values, tangents)
    _, wanted = torch.func.jvp(lambda *v: at(spec.reference, *v), values, tangents)
    torch.testing.assert_close(found, wanted)


@differentiable_op
def test_function_transforms_equal_autograd(spec: OpSpec, device: torch.device) -> None:
    assert spec.public is not None
    sample = next(s for s in calls(spec, device, torch.float64) if s.name == "dense")

    def loss(function: Any, first: torch.Tensor) -> torch.Tensor:
        outputs = tensors(function(first, *sample.args[1:], **sample.kwargs))
        return sum((out.square().sum() for out in outputs), start=torch.zeros((), dtype=torch.float64, device=device))

    found = torch.func.grad(lambda v: loss(spec.public, v))(sample.args[0])
    wanted = torch.func.grad(lambda v: loss(spec.reference, v))(sample.args[0])
    torch.testing.assert_close(found, wanted)
