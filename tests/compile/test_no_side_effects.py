"""Importing the package, and asking for options, changes nothing of torch or of the process: field by field."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import logging, os, signal, sys, threading, warnings
import torch
import torch._dynamo.config, torch._functorch.config, torch._inductor.config, torch.fx.experimental._config
import torch._inductor.compile_fx, torch._dynamo.backends.registry

def configs():
    modules = (torch._dynamo.config, torch._functorch.config, torch._inductor.config, torch.fx.experimental._config)
    return {(m.__name__, k): repr(v) for m in modules for k, v in m.get_config_copy().items()}

def loggers():
    known = logging.root.manager.loggerDict.values()
    named = [logging.getLogger()] + [l for l in known if isinstance(l, logging.Logger)]
    return {l.name: (l.level, l.disabled, l.propagate, [repr(h) for h in l.handlers], [repr(f) for f in l.filters])
            for l in named}

def state():
    backends = torch.backends
    return {
        "dtype": torch.get_default_dtype(), "grad": torch.is_grad_enabled(), "threads": torch.get_num_threads(),
        "interop": torch.get_num_interop_threads(), "deterministic": torch.are_deterministic_algorithms_enabled(),
        "precision": torch.get_float32_matmul_precision(), "seed": torch.initial_seed(),
        "random": torch.random.get_rng_state().tolist(), "autocast": torch.is_autocast_enabled("cpu"),
        "cudnn": (backends.cudnn.enabled, backends.cudnn.benchmark), "mkldnn": backends.mkldnn.enabled,
        "environment": dict(os.environ), "filters": [repr(f) for f in warnings.filters], "path": list(sys.path),
        "hooks": (sys.excepthook, sys.displayhook, threading.excepthook, sys.getrecursionlimit()),
        "handlers": {s: signal.getsignal(s) for s in signal.valid_signals()},
        "importers": list(map(repr, sys.meta_path)),
        "threads running": threading.active_count(), "torch": sorted(vars(torch)), "nn": sorted(vars(torch.nn)),
        "functional": {k: id(v) for k, v in vars(torch.nn.functional).items()},
        "tensor": {k: id(v) for k, v in vars(torch.Tensor).items() if not k.startswith("__")},
        "compile": (id(torch.compile), id(torch._inductor.compile_fx.compile_fx)),
    }

def all_of_it():
    return {"configs": configs(), "loggers": loggers(), **state()}

before = all_of_it()
import opgraft
CALL
after = all_of_it()
for name in before:
    if name == "loggers":
        after[name] = {k: v for k, v in after[name].items() if k in before[name]}
    if before[name] != after[name]:
        print("changed:", name, before[name] if name != "configs" else
              {k: (v, after[name].get(k)) for k, v in before[name].items() if v != after[name].get(k)}, after[name])
        sys.exit(1)
"""


@pytest.mark.parametrize("call", ["", "opgraft.compile_options(); opgraft.compile_options('max-autotune')"])
def test_nothing_of_the_process_changes(call: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.replace("CALL", call)], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
