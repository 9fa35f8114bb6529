"""A sharded tensor cannot be given to the op.

**What it means.** The op has no DTensor sharding rule.

**Why it matters.** Under tensor or sequence parallelism every call ends in an error.

Fails: an op without a rule. Passes::

    @torch.distributed.tensor.experimental.register_sharding(torch.ops.mylib.double.default)
    def _(x): return [([Shard(0)], [Shard(0)]), ([Replicate()], [Replicate()])]

**Remedies.** ``add-sharding-rule``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

import opgraft
from opgraft.diagnostics.conform.lab.bench import Bench, Fault, NotApplicable, NotRun, sentence
from opgraft.diagnostics.conform.lab.memory import fresh_call
from opgraft.diagnostics.conform.lab.tree import map_tensors

KIND = "not-exportable"
WORDS = "sharding strategy"


def check(bench: Bench) -> Iterator[Fault]:
    if not torch.distributed.is_available():
        raise NotRun("this torch has no torch.distributed")
    if bench.device.type != "cpu":
        raise NotRun("asked on the CPU only")
    if not bench.cases[0].tensors:
        raise NotApplicable("the op takes no tensor")
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, distribute_tensor

    if dist.is_initialized():
        raise NotRun("the process takes part in a job")
    # Rules of opgraft's own ops wait for the first DTensor that a public function is given.
    opgraft.register_sharding_rules()
    case = bench.cases[0]
    store: Any = getattr(dist, "HashStore")  # noqa: B009 - not in torch's own list of exports
    dist.init_process_group("gloo", store=store(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        args, kwargs = fresh_call(case, requires_grad=False)
        try:
            args, kwargs = map_tensors(lambda tensor: distribute_tensor(tensor, mesh, [Replicate()]), (args, kwargs))
        except (NotImplementedError, RuntimeError) as error:
            raise NotRun(f"a mesh holds no such tensor: {sentence(error)}") from error
        bench.tell(case, doing="compile")
        try:
            with torch.no_grad():
                bench.op(*args, **kwargs)
        except Exception as error:
            if WORDS in str(error):
                yield Fault(
                    f"{bench.name} has no sharding rule: a DTensor cannot be given to it",
                    case,
                    evidence=(sentence(error),),
                    remedies=("add-sharding-rule",),
                    severity="note",
                )
    finally:
        dist.destroy_process_group()
