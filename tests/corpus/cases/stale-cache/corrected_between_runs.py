# case: S67
"""A filter is drafted with a wrong schema in one run of the program and corrected in the next; both share a cache."""
import os
import subprocess
import sys
import tempfile

draft = sys.argv[1:] == ["draft"]
if not draft:
    scratch = tempfile.TemporaryDirectory()
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = scratch.name
    subprocess.run([sys.executable, __file__, "draft"], check=True)

import torch


@torch.library.custom_op("demo_comb::filter_into", mutates_args=() if draft else ("out",))
def filter_into(signal: torch.Tensor, out: torch.Tensor) -> None:
    torch.add(signal, signal.roll(7), alpha=0.5, out=out)


filter_into.register_fake(lambda signal, out: None)


def echo(signal, out):
    loud = torch.tanh(3 * signal)
    torch.ops.demo_comb.filter_into(loud, out)  # !! stale-cache remedy=clear-cache
    return out - loud


result = torch.compile(echo)(torch.linspace(0, 1, 64), torch.zeros(64))
print("draft" if draft else "corrected", result.abs().sum().item())
