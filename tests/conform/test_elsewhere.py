"""Ops examined in another process: calls travel as they were, and a script's registrations without its work."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from opgraft.diagnostics.conform.lab.case import Case
from opgraft.diagnostics.conform.lab.replay import NAME, replay
from opgraft.diagnostics.conform.lab.saved import load_cases, save_cases
from opgraft.registry import resolve

SCRIPT = '''
import torch
from pathlib import Path

FACTOR = 3.0
lib = torch.library.Library("{ns}", "DEF")
lib.define("dense(Tensor x) -> Tensor")


def dense(x):
    """Reads its input as if it were contiguous."""
    out = torch.empty(x.shape)
    room = x.untyped_storage().nbytes() >= (x.storage_offset() + x.numel()) * 4
    out.view(-1).copy_(x.as_strided((x.numel(),), (1,), x.storage_offset()) if room else x.flatten())
    return out * FACTOR


lib.impl("dense", dense, "CPU")


@torch.library.register_fake("{ns}::dense")
def _(x):
    return x.new_empty(x.shape)


if FACTOR > 1:

    @torch.library.custom_op("{ns}::bias", mutates_args=())
    def bias(x: torch.Tensor, by: float) -> torch.Tensor:
        return x + by


model = torch.nn.Linear(4, 6)
Path("{ran}").write_text("ran")
with torch.no_grad():
    torch.ops.{ns}.dense(model(torch.randn(8, 4)).t())
raise SystemExit
'''


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.randn(4, 6),
        lambda: torch.randn(4, 6).t(),
        lambda: torch.randn(8, 12)[::2, 1::3],
        lambda: torch.randn(9)[1:],
        lambda: torch.randn(3, 1).expand(3, 5),
        lambda: torch.randn(0, 3),
        lambda: torch.randn(()),
        lambda: torch.arange(5),
        lambda: torch.randn(4, dtype=torch.bfloat16).requires_grad_(),
        lambda: torch.randn(3, dtype=torch.complex64),
        lambda: torch.tensor([True, False]),
    ],
)
def test_a_call_comes_back_as_it_was(make, tmp_path: Path) -> None:
    tensor = make()
    call = Case((tensor, [tensor, 2.5], 1 + 2j), {"dtype": torch.float16, "mode": "mean", "none": None}, name="a call")
    save_cases(tmp_path / "call", (call,))
    (found,) = load_cases(tmp_path / "call")
    back = found.args[0]
    assert torch.equal(back, tensor)
    assert back.stride() == tensor.stride()
    assert back.dtype == tensor.dtype
    assert back.requires_grad == tensor.requires_grad
    assert tensor.numel() == 0 or back.data_ptr() % 16 == tensor.data_ptr() % 16
    assert found.args[1][1:] == [2.5]
    assert found.args[2] == 1 + 2j
    assert found.kwargs == call.kwargs
    assert found.name == "a call"


def test_what_cannot_travel_is_refused_in_words(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="cannot be handed to another process"):
        save_cases(tmp_path / "call", (Case((object(),)),))


def test_a_script_registers_its_ops_and_does_not_run(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(ns="replayed", ran=tmp_path / "ran"))
    try:
        replay(str(script))
        assert not (tmp_path / "ran").exists()
        assert resolve("replayed::dense")(torch.ones(2)).tolist() == [3.0, 3.0]
        assert resolve("replayed::bias")(torch.ones(1), 1.0).item() == 2.0
    finally:
        sys.modules.pop(NAME, None)


def test_a_program_that_cannot_be_forked_has_its_ops_examined_elsewhere(tmp_path: Path) -> None:
    """As where it uses CUDA: the fork is refused here by hand, the rest is the real thing."""
    import subprocess

    script, recording = tmp_path / "train.py", tmp_path / "recording"
    script.write_text(SCRIPT.format(ns="elsewhere", ran=tmp_path / "ran").replace("raise SystemExit", ""))
    driver = (
        "import sys, runpy, __main__\n"
        "from pathlib import Path\n"
        "from opgraft.diagnostics.conform import record\n"
        "from opgraft.diagnostics.conform.lab import isolate\n"
        "isolate.can_fork = lambda: False\n"
        f"stop = record.install(Path({str(recording)!r}))\n"
        f"__main__.__file__ = {str(script)!r}\n"
        f"runpy.run_path({str(script)!r}, run_name='__main__')\n"
        "stop()\n"
    )
    subprocess.run([sys.executable, "-c", driver], check=True, timeout=300)
    said = [json.loads(line) for line in recording.read_text().splitlines()]
    kinds = {message["finding"]["kind"]: message["finding"] for message in said if message["say"] == "finding"}
    assert kinds["layout-assumed"]["severity"] == "error"
    assert kinds["layout-assumed"]["location"]["path"] == str(script)
    assert {message["result"]["op"] for message in said if message["say"] == "result"} == {"elsewhere::dense"}
