"""DDP and FSDP2 over two gloo processes: the same decisions on both ranks, and the gradients of plain torch."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from processes import run_ranks

WORKER = """
import json, sys
import torch, torch.distributed as dist
from torch import nn
rank, folder, tests, case = int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4]
sys.path.insert(0, tests)
from models import Plain, agreeing, fake_times
import opgraft
from opgraft.compile import choice, measure, timing
measure.confirm = agreeing
timing.interleave = fake_times(2.0, 1.0)
seen = []
choice.LISTENERS.append(seen.extend)
dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)

def blocks():
    torch.manual_seed(0)
    return nn.Sequential(*(Plain(16, written_out=i == 1) for i in range(3)))

torch.manual_seed(rank)
x = torch.randn(6, 16)
plain = blocks()
plain(x).square().sum().backward()
wanted = {n: p.grad.clone() for n, p in plain.named_parameters()}
for gradient in wanted.values():
    dist.all_reduce(gradient, op=dist.ReduceOp.SUM)
    gradient /= 2
model = blocks()
options = opgraft.compile_options(store=f"{folder}/store-{rank}")
if case == "ddp":
    run = torch.compile(nn.parallel.DistributedDataParallel(model), options=options)
elif case == "fsdp2":
    from torch.distributed.fsdp import fully_shard
    for block in model:
        block.compile(options=options)
        fully_shard(block)
    fully_shard(model)
    run = model
else:
    # Every block compiled for itself, the model around it in eager mode.
    for block in model:
        block.compile(backend="opgraft", options={"store": f"{folder}/store-{rank}"})
    run = nn.parallel.DistributedDataParallel(model)
run(x).square().sum().backward()
worst = 0.0
for name, parameter in model.named_parameters():
    gradient = parameter.grad
    if hasattr(gradient, "full_tensor"):
        gradient = gradient.full_tensor()
    worst = max(worst, float((gradient - wanted[name]).abs().max() / wanted[name].abs().max()))
print(json.dumps([sorted({r.decision.choice for r in seen}), len(seen), worst]))
"""


@pytest.mark.timeout(300)
@pytest.mark.parametrize("case", ["ddp", "fsdp2", "regional"])
def test_gradients_and_decisions_agree(case: str, tmp_path: Path) -> None:
    first, second = (json.loads(line) for line in run_ranks(WORKER, tmp_path, case))
    assert first[:2] == second[:2]
    assert first[0] == ["kernel"]
    assert first[1] >= 2, "both spellings of the idiom are sites"
    assert max(first[2], second[2]) < 1e-4
