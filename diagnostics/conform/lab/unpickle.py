"""``python -m opgraft.diagnostics.conform.lab.unpickle FOLDER [MODULE ...]``: calls a model that the doctor pickled.

Imports the modules, loads ``model.pkl`` and the call beside it, and leaves the results in ``results.pt``.
"""

from __future__ import annotations

import pickle
import sys
from pathlib import Path

import torch

from opgraft.diagnostics.conform.host import import_named
from opgraft.diagnostics.conform.lab import saved
from opgraft.diagnostics.conform.lab.tree import tensors


def main(folder: Path, modules: list[str]) -> None:
    for name in modules:
        import_named(name)
    (case,) = saved.load_cases(folder / "call")
    # The doctor wrote these bytes a moment ago, into a folder of its own.
    model = pickle.loads((folder / "model.pkl").read_bytes())
    with torch.no_grad():
        torch.manual_seed(0)
        found = model(*[value.detach() if isinstance(value, torch.Tensor) else value for value in case.args])
    torch.save([part.detach().cpu().contiguous() for part in tensors(found)], folder / "results.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
