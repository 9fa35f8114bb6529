"""What only a GPU can show of an op: stream, device, graphs, launches, size. Over the table of ops."""

from __future__ import annotations

import pytest
import torch

from opgraft.registry import OpSpec

from table import calls, every_op, map_tensors, same_bits, tensors

pytestmark = [pytest.mark.gpu]
CUDA = torch.device("cuda")


def _first(spec: OpSpec):  # type: ignore[no-untyped-def]
    return max(calls(spec, CUDA), key=lambda sample: sum(t.numel() for t in tensors(sample.args)))


@every_op
def test_work_lands_on_the_current_stream(spec: OpSpec) -> None:
    """The inputs are written behind a long kernel on a side stream: an op on another stream would read the old ones."""
    sample = _first(spec)
    wanted = spec.op(*sample.args, **sample.kwargs)
    args, kwargs = map_tensors(torch.zeros_like, (sample.args, sample.kwargs))
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)
        for empty, full in zip(tensors((args, kwargs)), tensors((sample.args, sample.kwargs)), strict=True):
            empty.copy_(full)
        found = spec.op(*args, **kwargs)
    side.synchronize()
    for got, want in zip(tensors(found), tensors(wanted), strict=True):
        assert same_bits(got, want), "the op did not wait for the stream it was called on"


@every_op
def test_no_hidden_synchronisation(spec: OpSpec) -> None:
    sample = _first(spec)
    spec.op(*sample.args, **sample.kwargs)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        spec.op(*sample.args, **sample.kwargs)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@every_op
def test_capture_and_replay_with_new_data(spec: OpSpec) -> None:
    sample = _first(spec)
    args, kwargs = map_tensors(torch.clone, (sample.args, sample.kwargs))
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        spec.op(*args, **kwargs)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = spec.op(*args, **kwargs)
    for tensor in tensors((args, kwargs)):
        if tensor.is_floating_point():
            tensor.mul_(0.5)
    graph.replay()
    torch.cuda.synchronize()
    for got, want in zip(tensors(captured), tensors(spec.op(*args, **kwargs)), strict=True):
        assert same_bits(got, want)


@every_op
def test_reduce_overhead_replays_with_new_data(spec: OpSpec) -> None:
    sample = _first(spec)
    compiled = torch.compile(lambda *a, **k: spec.op(*a, **k), fullgraph=True, mode="reduce-overhead")
    for factor in (1.0, 0.5, 0.25, 0.75):
        scaled = map_tensors(lambda t, f=factor: t * f if t.is_floating_point() else t, sample.args)
        torch.compiler.cudagraph_mark_step_begin()
        found = map_tensors(torch.clone, compiled(*scaled, **sample.kwargs))
        for got, want in zip(tensors(found), tensors(spec.op(*scaled, **sample.kwargs)), strict=True):
            torch.testing.assert_close(got, want)


@every_op
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_the_second_device_while_the_first_is_current(spec: OpSpec) -> None:
    sample = _first(spec)
    wanted = spec.op(*sample.args, **sample.kwargs)
    args, kwargs = map_tensors(lambda t: t.to("cuda:1"), (sample.args, sample.kwargs))
    with torch.cuda.device(0):
        found = spec.op(*args, **kwargs)
        assert torch.cuda.current_device() == 0
    for got, want in zip(tensors(found), tensors(wanted), strict=True):
        assert got.device == torch.device("cuda:1")
        assert same_bits(got.cpu(), want.cpu())


@every_op
def test_tensors_on_the_cpu_and_the_gpu_are_refused(spec: OpSpec) -> None:
    sample = calls(spec, CUDA)[0]
    places = [i for i, value in enumerate(sample.args) if isinstance(value, torch.Tensor)]
    for index in places if len(places) > 1 else ():
        args = [*sample.args[:index], sample.args[index].cpu(), *sample.args[index + 1 :]]
        with pytest.raises(RuntimeError, match=spec.op._schema.name.partition("::")[2]):
            spec.op(*args, **sample.kwargs)


@every_op
def test_more_than_two_to_the_31_elements(spec: OpSpec) -> None:
    if spec.large is None:
        pytest.skip(f"{spec.name} has no large sample")
    sample, check = spec.large(CUDA, torch.bfloat16)
    assert max(t.numel() for t in tensors(sample.args)) > 2**31
    check(spec.op(*sample.args, **sample.kwargs))
