"""Two processes that share torch's cache folder: whatever changed between them, the right code runs."""

from __future__ import annotations

import copy
import io
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import opgraft
from opgraft.compile.passes import SitePass

PROGRAM = """
import json, sys, warnings
import torch
from torch._dynamo.utils import counters
import opgraft
from opgraft.compile import identity, measure, timing
settings = json.loads(sys.argv[1])
sys.path.insert(0, settings["tests"])
from models import agreeing, fake_times

torch.manual_seed(0)
timing.interleave = fake_times(*settings["times"])
measure.confirm = agreeing
library = torch.library.Library("opgraft_cache", "FRAGMENT")
library.define("twice(Tensor x) -> Tensor")
namespace = {}
exec(compile(open(settings["source"]).read(), settings["source"], "exec"), namespace)
library.impl("twice", namespace["kernel"], "CPU")
torch.library.register_fake("opgraft_cache::twice", namespace["fake"], lib=library)
opgraft.describe("opgraft_cache::twice", namespace["reference"])
if settings["rules"]:
    identity._own_sources = lambda: settings["rules"]

def function(x):
    y = torch.ops.opgraft_cache.twice(x + 1)
    return y.double() if y.dtype == torch.float32 else y

options = opgraft.compile_options(choose=settings["choose"], store=settings["store"])
with torch.no_grad():
    result = torch.compile(function, options=options, fullgraph=True)(torch.ones(8))
print(json.dumps({
    "value": result.tolist()[0], "dtype": str(result.dtype), "kernel ran": namespace["calls"],
    "hits": counters["aot_autograd"]["autograd_cache_hit"], "misses": counters["aot_autograd"]["autograd_cache_miss"],
}))
"""

SOURCE = """
import torch
calls = 0
def kernel(x):
    global calls
    calls += 1
    return ({kernel}).to({dtype})
def fake(x):
    return torch.empty_like(x, dtype={dtype})
def reference(x):
    return ({reference}).to({dtype})
"""


class Machine:
    """Runs the program in fresh processes with one cache folder."""

    def __init__(self, folder: Path, cache: Path) -> None:
        self.folder = folder
        self.cache = cache

    def run(
        self,
        *,
        kernel: str = "x * 2",
        reference: str = "x + x",
        dtype: str = "torch.float32",
        choose: str = "kernel",
        times: tuple[float, float] = (2.0, 1.0),
        rules: str = "",
    ) -> dict[str, Any]:
        source = self.folder / "op.py"
        source.write_text(SOURCE.format(kernel=kernel, reference=reference, dtype=dtype))
        settings = {
            "source": str(source),
            "choose": choose,
            "store": str(self.folder / "store"),
            "times": times,
            "rules": rules,
            "tests": str(Path(__file__).parent),
        }
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, json.dumps(settings)],
            capture_output=True,
            text=True,
            timeout=300,
            env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(self.cache)},
        )
        assert done.returncode == 0, done.stderr
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return found


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for the module: a fresh one costs a compile of torch's C++ headers."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def machine(tmp_path: Path, cache: Path) -> Machine:
    return Machine(tmp_path, cache)


def test_nothing_changed_is_a_hit_and_a_changed_decision_is_not(machine: Machine) -> None:
    first = machine.run(choose="measured")
    assert (first["value"], first["hits"]) == (4.0, 0)
    second = machine.run(choose="measured")
    assert second["value"] == 4.0
    assert (second["hits"], second["misses"]) == (1, 0), "a warm start takes the same decision, from the cache"
    assert second["kernel ran"] == 1
    (store,) = (machine.folder / "store").glob("*.json")
    content = json.loads(store.read_text())
    for entry in content["decisions"].values():
        entry["choice"] = "compiler"
    store.write_text(json.dumps(content))
    third = machine.run(choose="measured")
    assert (third["value"], third["kernel ran"], third["hits"]) == (4.0, 0, 0)


def test_a_changed_fake_or_rule_is_no_hit(machine: Machine) -> None:
    assert machine.run()["dtype"] == "torch.float64"
    again = machine.run(dtype="torch.float16")
    assert (again["dtype"], again["value"], again["hits"]) == ("torch.float16", 4.0, 0)
    assert machine.run(dtype="torch.float16")["hits"] == 1
    assert machine.run(dtype="torch.float16", rules="another version")["hits"] == 0


def test_a_changed_reference_is_no_hit(machine: Machine) -> None:
    assert machine.run(choose="compiler")["value"] == 4.0
    again = machine.run(choose="compiler", reference="x * 3", kernel="x * 3")
    assert (again["value"], again["kernel ran"]) == (6.0, 0)


def _as_a_key(value: object) -> bytes:
    """As torch pickles what goes into a cache key: without a memo, so that nothing may refer to itself."""
    stream = io.BytesIO()
    pickler = pickle.Pickler(stream)
    pickler.fast = True
    pickler.dump(value)
    return stream.getvalue()


def _site_pass(**settings: Any) -> SitePass:
    found: SitePass = opgraft.compile_options(**settings)["pre_grad_custom_pass"]
    return found


def test_a_pass_in_torchs_config_is_pickled_as_its_identity(tmp_path: Path) -> None:
    """Torch 2.11 pickles the object at this hook, whatever it has found by then."""
    one, other = _site_pass(store=tmp_path / "one"), _site_pass(store=tmp_path / "other")
    one.chooser.reports.append(object())  # type: ignore[arg-type]
    assert _as_a_key(one) == _as_a_key(other)
    assert _as_a_key(one) != _as_a_key(_site_pass(store=tmp_path, choose="kernel"))
    assert copy.deepcopy(one) is one
    assert copy.copy(one) is one
