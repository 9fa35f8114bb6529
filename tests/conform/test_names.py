"""``opgraft doctor`` takes names, patterns, or only what registers the ops; it says what it does and how long."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest
import torch
from rich.console import Console

from opgraft.diagnostics.collect.explaining import Outputs, Shown
from opgraft.diagnostics.conform import command, errand
from opgraft.diagnostics.conform.host import examine_elsewhere
from opgraft.diagnostics.conform.lab import names

MODULE = """
import torch
lib = torch.library.Library("{ns}", "DEF")
for name in ("one", "one.of_two", "other"):
    lib.define(name + "(Tensor x) -> Tensor")
    lib.impl(name, lambda x: x * 2, "CompositeExplicitAutograd")
"""


@pytest.mark.parametrize(
    ("pattern", "name", "fits"),
    [
        ("mine::*", "mine::scale", True),
        ("mine::*", "mine::scale.out", True),
        ("mine::scale", "mine::scale.out", False),
        ("mine::s*e", "mine::scale.out", True),
        ("mine::*_backward", "mine::scale", False),
        ("mine::[a-c]*", "mine::bias", True),
        ("*", "yours::scale", True),
    ],
)
def test_a_pattern_is_that_of_a_shell(pattern: str, name: str, fits: bool) -> None:
    assert names.asks_for(pattern, name) == fits


def test_new_leaves_out_what_was_there() -> None:
    before = frozenset(names.registered())
    assert names.expanded(names.NEW, before) == [names.NEW]
    assert "aten::add.Tensor" in names.expanded("aten::add*")


def test_a_kernel_for_a_name_that_nobody_defines_is_no_op() -> None:
    lib = torch.library.Library("kernel_alone", "DEF")
    lib.define("there(Tensor x) -> Tensor")
    lib.impl("there", lambda x: x, "CPU")
    other = torch.library.Library("kernel_alone", "IMPL")
    other.impl("there.missing", lambda x: x, "CPU")
    assert "kernel_alone::there.missing" in names.registered()
    assert names.expanded("kernel_alone::*") == ["kernel_alone::there"]


@pytest.mark.parametrize("asked", [(), ("{ns}::*",)])
def test_all_that_a_module_registers(tmp_path: Path, asked: tuple[str, ...]) -> None:
    ns = f"named{len(asked)}"
    module = tmp_path / f"{ns}_ops.py"
    module.write_text(MODULE.format(ns=ns))
    begun: list[tuple[str, int, int]] = []
    report = examine_elsewhere(
        tuple(one.format(ns=ns) for one in asked) or (names.NEW,),
        imports=(str(module),),
        seconds=0.2,
        progress=lambda *told: begun.append(told),
    )
    found = {result.op for result in report.checks}
    assert {name.partition(".")[0] for name in found} == {f"{ns}::one", f"{ns}::other"}
    assert len(found) == 3
    assert begun
    assert all(total == 3 for _, _, total in begun)


def test_nothing_asked_and_nothing_registered_are_said() -> None:
    out, errors = io.StringIO(), io.StringIO()

    def run(ops: tuple[str, ...], imports: tuple[str, ...]) -> int:
        return command.run(
            ops, imports=imports, outputs=Outputs(), shown=Shown(), thorough=False, sanitizer=False, device="cpu",
            seconds=1.0, console=Console(file=out, width=200), errors=Console(file=errors, width=200),
        )  # fmt: skip

    assert run((), ()) == 2
    assert "name the ops" in errors.getvalue()
    assert run((), ("json",)) == 1
    assert "register no op" in out.getvalue()
    assert run(("nobody::*",), ()) == 1
    assert "no op nobody::*" in out.getvalue()


def test_a_process_that_hangs_is_killed_with_its_children(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(errand, "START_SECONDS", 0.5)
    child = tmp_path / "child"
    script = f"import os, time\nif os.fork() == 0:\n  open({str(child)!r}, 'w').write(str(os.getpid()))\ntime.sleep(60)"
    files = errand.Files.within(tmp_path)
    files.request.write_bytes(msgspec.json.encode({}))
    assert errand.run(files, seconds=1.0, wrap=(sys.executable, "-c", script)) == "it did not come back in time"
    pid = int(child.read_text())
    for _ in range(100):
        if not _alive(pid):
            break
        time.sleep(0.05)
    assert not _alive(pid)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return state != "Z"


SLOW = """
import time, torch
@torch.library.custom_op("{ns}::sleeps", mutates_args=())
def sleeps(x: torch.Tensor) -> torch.Tensor:
    open({sign!r}, "w").write(str(__import__("os").getpid()))
    time.sleep(60)
    return x * 2
"""


def test_nothing_outlives_a_doctor_that_is_killed(tmp_path: Path) -> None:
    sign, module = tmp_path / "running", tmp_path / "slow_ops.py"
    module.write_text(SLOW.format(ns="slow_ops", sign=str(sign)))
    doctor = subprocess.Popen(
        [sys.executable, "-m", "opgraft.diagnostics.cli", "doctor", "--import", str(module), "slow_ops::sleeps"],
        stdout=subprocess.DEVNULL,
    )
    for _ in range(1200):
        if sign.exists() and sign.read_text():
            break
        time.sleep(0.05)
    pid = int(sign.read_text())
    assert _alive(pid)
    doctor.kill()
    doctor.wait()
    for _ in range(100):
        if not _alive(pid):
            break
        time.sleep(0.05)
    assert not _alive(pid)
