"""Run by torchrun with two processes: every op on DTensors split along the first dimension, against the whole."""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh

import opgraft
from opgraft.registry import specs


def main() -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    opgraft.register_sharding_rules()
    for spec in specs("opgraft"):
        assert spec.samples is not None
        for sample in spec.samples(torch.device("cpu"), torch.float32):
            tensors = [v for v in sample.args if isinstance(v, torch.Tensor)]
            if not sample.family or len({t.dim() for t in tensors}) != 1:
                continue
            wanted = spec.op(*sample.args, **sample.kwargs)
            for placement in (Replicate(), *(Shard(dim) for dim in range(tensors[0].dim()))):
                args = [
                    distribute_tensor(v, mesh, [placement]) if isinstance(v, torch.Tensor) else v for v in sample.args
                ]
                found = spec.op(*args, **sample.kwargs)
                for got, want in zip(_all(found), _all(wanted), strict=True):
                    assert isinstance(got, DTensor), f"{spec.name} left the mesh"
                    if got.element_size() == 1:  # gloo gathers no 8-bit floats
                        got, want = got.float(), want.float()
                    torch.testing.assert_close(got.full_tensor(), want)
    x = distribute_tensor(torch.randn(8, 6, requires_grad=True), mesh, [Shard(0)])
    assert opgraft.gelu(x).placements == (Shard(0),), "a row-split input must stay split"
    cross_entropy_of_split_rows(mesh)
    if dist.get_rank() == 0:
        print("sharded ops agree")
    dist.barrier()
    # Gloo's threads end their process with an abort about once in a hundred times when it takes them down.
    sys.stdout.flush()
    os._exit(0)


def cross_entropy_of_split_rows(mesh: object) -> None:
    """Targets have no classes, so its samples are not among those above. Rows stay split, in the gradient as well."""
    torch.manual_seed(0)
    whole, target = torch.randn(8, 12, dtype=torch.float64, requires_grad=True), torch.randint(0, 12, (8,))
    target[3] = -100
    for reduction in ("none", "sum", "mean"):
        logits = distribute_tensor(whole.detach(), mesh, [Shard(0)]).requires_grad_()  # type: ignore[arg-type]
        rows = distribute_tensor(target, mesh, [Shard(0)])  # type: ignore[arg-type]
        loss = opgraft.cross_entropy(logits, rows, reduction=reduction, label_smoothing=0.1)
        wanted = torch.nn.functional.cross_entropy(whole, target, reduction=reduction, label_smoothing=0.1)
        torch.testing.assert_close(loss.full_tensor(), wanted)  # type: ignore[union-attr]
        loss.sum().backward()  # type: ignore[union-attr]
        (exact,) = torch.autograd.grad(wanted.sum(), whole)
        assert logits.grad.placements == (Shard(0),), reduction
        torch.testing.assert_close(logits.grad.full_tensor(), exact)


def _all(value: object) -> list[torch.Tensor]:
    return list(value) if isinstance(value, (tuple, list)) else [value]  # type: ignore[list-item]


if __name__ == "__main__":
    main()
