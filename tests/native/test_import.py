"""Importing opgraft registers ops and touches nothing else."""

from __future__ import annotations

import subprocess
import sys

import pytest

SNAPSHOT = """
import logging, sys, json, warnings
import torch
def values(module):
    return {k: repr(v) for k, v in sorted(module.get_config_copy().items())}
import torch._inductor.config, torch._dynamo.config, torch._functorch.config
def state():
    loggers = {n: (l.level, len(getattr(l, "handlers", ())), l.propagate)
               for n, l in logging.root.manager.loggerDict.items() if isinstance(l, logging.Logger)}
    return {
        "inductor": values(torch._inductor.config), "dynamo": values(torch._dynamo.config),
        "functorch": values(torch._functorch.config), "loggers": loggers,
        "threads": torch.get_num_threads(), "dtype": str(torch.get_default_dtype()),
        "grad": torch.is_grad_enabled(), "rng": torch.get_rng_state().tolist(),
        "hooks": [repr(f) for f in sys.meta_path], "excepthook": repr(sys.excepthook), "filters": len(warnings.filters),
    }
before = state()
import opgraft
after = state()
assert "opgraft.diagnostics" not in sys.modules
for name in ("rich", "typer", "jinja2", "matplotlib", "msgspec", "libcst", "torch.distributed.tensor"):
    assert name not in sys.modules or name in BEFORE, name
# A module that torch loads late brings its logger along; those that were there stay as they were.
after["loggers"] = {name: after["loggers"].get(name) for name in before["loggers"]}
for key in before:
    assert before[key] == after[key], key
"""


@pytest.mark.core
def test_import_changes_no_setting_of_the_process() -> None:
    code = SNAPSHOT.replace("before = state()", "before = state(); BEFORE = set(sys.modules)", 1)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_a_missing_library_says_what_to_do(tmp_path) -> None:  # type: ignore[no-untyped-def]
    code = (
        "import torch, pathlib, opgraft.library as library\n"
        "library.CPU_LIBRARY = pathlib.Path('/nowhere/libopgraft.so')\n"
        "try: library.load()\n"
        "except ImportError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert "the kernels were not built" in done.stdout
    assert "pip install --no-build-isolation -e ." in done.stdout
