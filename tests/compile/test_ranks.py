"""All ranks of a job take one decision, even where their own measurements would differ."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from processes import run_ranks

WORKER = """
import json, sys
import torch, torch.distributed as dist
rank, folder, tests, case = int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4]
sys.path.insert(0, tests)
from models import Perceptron, agreeing, fake_times
import opgraft
from opgraft.compile import measure, timing
from opgraft.compile.agree import Agreement
from opgraft.compile.site import Decision
dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
calls = []
def interleave(*args, **options):
    calls.append(1)
    # On its own rank 0 would find the kernel faster, rank 1 the compiler.
    return fake_times(*((2.0, 1.0) if rank == 0 else (1.0, 2.0)))(*args, **options)
timing.interleave = interleave
measure.confirm = agreeing
if case == "same graph":
    found = opgraft.sites(Perceptron(), torch.randn(6, 16), store=f"{folder}/store-{rank}")
    print(json.dumps([found[0].decision.choice, len(calls)]))
else:
    # Rank 0 never comes to this site.
    agreement = Agreement(patience=1.0)
    if rank == 1:
        decision = agreement.settle("only here", lambda: Decision("kernel", "rank 1 alone"))
        print(json.dumps([decision.choice, 0]))
    else:
        print(json.dumps(["", 0]))
"""


def both(folder: Path, case: str) -> list[list[object]]:
    return [json.loads(line) for line in run_ranks(WORKER, folder, case)]


@pytest.mark.timeout(240)
def test_rank_0_measures_and_all_use_its_decision(tmp_path: Path) -> None:
    assert both(tmp_path, "same graph") == [["kernel", 2], ["kernel", 0]]


@pytest.mark.timeout(240)
def test_a_rank_alone_with_a_site_does_not_wait_forever(tmp_path: Path) -> None:
    assert both(tmp_path, "a site that rank 0 lacks") == [["", 0], ["kernel", 0]]
