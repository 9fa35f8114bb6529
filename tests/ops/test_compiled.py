"""Under torch.compile and torch.export: one graph, one compile for many sizes, and eager's values and strides."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from opgraft.registry import OpSpec, Sample

from table import calls, differentiable, differentiable_op, every_op, families, tensors

FORMS = ("dense", "permuted", "sliced", "expanded", "offset by one", "empty", "ragged")


def _step(function: Any, sample: Sample) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    args, kwargs = differentiable(sample.args), differentiable(sample.kwargs)
    outputs = tensors(function(*args, **kwargs))
    wanted = [t for t in tensors((args, kwargs)) if t.requires_grad]
    scalars = [out.double().square().sum() for out in outputs if out.requires_grad]
    grads = torch.autograd.grad(scalars, wanted, allow_unused=True)
    return outputs, [g for g in grads if g is not None]


def _assert_same(found: list[torch.Tensor], wanted: list[torch.Tensor], what: str) -> None:
    assert len(found) == len(wanted), what
    for got, want in zip(found, wanted, strict=True):
        assert got.stride() == want.stride() or not got.numel(), (
            f"{what}: strides {got.stride()}, eager {want.stride()}"
        )
        torch.testing.assert_close(got, want, msg=lambda text: f"{what}: {text}")


@every_op
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_values_are_those_of_eager_in_one_graph(spec: OpSpec, backend: str, device: torch.device) -> None:
    compiled = torch.compile(lambda *a, **k: spec.op(*a, **k), fullgraph=True, backend=backend)
    chosen = [s for s in calls(spec, device) if s.name in FORMS]
    for sample in chosen if backend == "aot_eager" else chosen[:3]:
        torch._dynamo.reset()
        found, wanted = compiled(*sample.args, **sample.kwargs), spec.op(*sample.args, **sample.kwargs)
        _assert_same(tensors(found), tensors(wanted), f"{spec.name}, {sample.name}")


@differentiable_op
@pytest.mark.core
def test_forward_and_backward_in_one_graph(spec: OpSpec, device: torch.device) -> None:
    function = spec.public or spec.op
    sample = next(iter(calls(spec, device)))
    counter = CompileCounterWithBackend("inductor")
    compiled = torch.compile(lambda *a, **k: function(*a, **k), fullgraph=True, backend=counter)
    for found, wanted in zip(_step(compiled, sample), _step(function, sample), strict=True):
        _assert_same(found, wanted, spec.name)
    assert counter.frame_count == 1


@every_op
@pytest.mark.core
def test_one_dynamic_compile_serves_every_size_of_a_family(spec: OpSpec, device: torch.device) -> None:
    function = spec.public or spec.op
    for family, members in families(spec, device).items():
        torch._dynamo.reset()
        counter = CompileCounterWithBackend("aot_eager")
        compiled = torch.compile(lambda *a, **k: function(*a, **k), fullgraph=True, dynamic=True, backend=counter)
        for sample in members:
            for found, wanted in zip(_step(compiled, sample), _step(function, sample), strict=True):
                _assert_same(found, wanted, f"{spec.name}, {sample.name}")
        # Floats come in as tensors at first; torch compiles once more where an op wants them as numbers.
        expected = 1 + any(isinstance(value, float) for value in members[0].args)
        assert counter.frame_count == expected, f"{spec.name}: family {family} compiled {counter.frame_count} times"


@every_op
def test_the_op_in_the_middle_of_a_model_that_permutes(spec: OpSpec, device: torch.device) -> None:
    """Producers whose layout Inductor may choose must reach the kernel with the strides that the fake was told."""
    sample = next(s for s in calls(spec, device) if s.name == "dense")

    def model(*args: Any) -> list[torch.Tensor]:
        shaken = [(a.mT * 2).mT if isinstance(a, torch.Tensor) and a.dim() >= 2 else a for a in args]
        return [out + 1 for out in tensors(spec.op(*shaken, **sample.kwargs))]

    found, wanted = torch.compile(model, fullgraph=True)(*sample.args), model(*sample.args)
    for got, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(got, want)


@every_op
def test_export_and_run(spec: OpSpec, device: torch.device) -> None:
    sample = next(s for s in calls(spec, device) if s.name == "dense")

    class Model(torch.nn.Module):
        def forward(self, *args: Any) -> Any:
            return spec.op(*args, **sample.kwargs)

    program = torch.export.export(Model(), sample.args)
    assert spec.op in {node.target for node in program.graph.nodes}
    for got, want in zip(tensors(program.module()(*sample.args)), tensors(spec.op(*sample.args)), strict=True):
        torch.testing.assert_close(got, want)


@every_op
def test_dynamic_sizes_survive_export(spec: OpSpec, device: torch.device) -> None:
    for members in families(spec, device).values():
        first, *others = members
        positions = [i for i, v in enumerate(first.args) if isinstance(v, torch.Tensor)]
        varying = {
            i: dict.fromkeys(range(first.args[i].dim()), torch.export.Dim.AUTO) if i in positions else None
            for i in range(len(first.args))
        }

        class Model(torch.nn.Module):
            def forward(self, *args: Any) -> Any:
                return spec.op(*args)

        if first.kwargs:
            continue
        program = torch.export.export(Model(), first.args, dynamic_shapes={"args": tuple(varying.values())})
        for sample in others:
            found = tensors(program.module()(*sample.args))
            for got, want in zip(found, tensors(spec.op(*sample.args)), strict=True):
                torch.testing.assert_close(got, want)
