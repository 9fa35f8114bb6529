"""Every step runs as its reader runs it, in a process of its own, and must say what its docstring promises.

The figures that a step prints are timings and are not looked at. Compiled code stays in the caches of the user who
runs the tests, as it does for a reader: the first run compiles for about a minute, later ones do not.
"""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "from_prototype_to_op"
ROOT = FOLDER.parents[1]
LIMIT_S = 400

needs_compiler = pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")
has_triton = importlib.util.find_spec("triton") is not None
has_gpu = torch.cuda.is_available()


def run(file: str, *arguments: str, expect: int = 0) -> str:
    """What the file prints; its exit code must be the expected one."""
    done = subprocess.run(
        [sys.executable, str(FOLDER / file), *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == expect, done.stdout
    return done.stdout


def worst_error(text: str) -> float:
    """The largest of the errors against float64 that a step printed."""
    return max(float(error) for error in re.findall(r"max error (\S+)", text))


def test_triton_computes_gelu_and_loses_the_gradient():
    text = run("step1_triton.py")
    if not has_triton:
        assert "pip install triton" in text
        assert "max error" not in text
        return
    assert worst_error(text) < 1e-2
    assert "float32" in text
    assert "float16" in text
    assert "gradient: lost" in text


@needs_compiler
@pytest.mark.slow
def test_load_inline_computes_gelu_and_refuses_what_it_cannot_do():
    text = run("step2_load_inline.py")
    assert worst_error(text) < 1e-5
    assert "refused: gelu_" in text


@needs_compiler
def test_extension_takes_every_dtype_and_stride_and_breaks_the_graph():
    text = run("step3_extension.py")
    for dtype in ("float32", "float64", "float16", "bfloat16"):
        assert f" {dtype} (" in text
    assert "(0, 1000)" in text
    assert "refused: gelu: x has dtype Int, expected a floating dtype" in text
    assert "torch.compile: 1 graph break, 2 graphs" in text


@needs_compiler
def test_extension_is_built_outside_the_source_tree_and_once():
    def library() -> Path:
        code = "import step3_extension; print(step3_extension.extension().__file__)"
        done = subprocess.run([sys.executable, "-c", code], cwd=FOLDER, capture_output=True, text=True, timeout=LIMIT_S)
        assert done.returncode == 0, done.stderr
        return Path(done.stdout.strip())

    first = library()
    built = first.stat().st_mtime_ns
    assert not first.is_relative_to(ROOT)
    assert library() == first
    assert first.stat().st_mtime_ns == built
    assert not list(FOLDER.rglob("*.so"))


@needs_compiler
def test_custom_op_passes_opcheck_and_compiles_in_one_graph():
    text = run("step4_torch_library.py")
    assert "opcheck: forward and backward pass" in text
    assert "one graph, right gradient" in text


@needs_compiler
def test_gradcheck_tells_right_from_wrong_in_float64_alone():
    text = run("step5_autograd_function.py")
    assert re.search(r"in float64: +right formula passes, wrong formula fails", text)
    assert re.search(r"in float32: +right formula fails", text)
    assert re.search(r"atol=0.3: +right formula passes, wrong formula passes", text)
    formula, single, double = (float(e) for e in re.findall(r"^error of the .*: (\S+)$", text, re.MULTILINE))
    assert formula < 1e-5
    assert single > 1e-3
    assert double < 1e-7


# A pitfall's file asserts that its wrong() is wrong and its mended() right; here: it really showed both.
@needs_compiler
@pytest.mark.parametrize(
    ("pitfall", "needs_gpu"),
    [
        ("non_contiguous", False),
        ("dtype_dispatch", False),
        ("wrong_device", False),
        ("fake_strides", False),
        ("wrong_stream", True),
        ("unchecked_launch", True),
    ],
)
def test_pitfall_fails_safely_and_is_mended(pitfall: str, needs_gpu: bool):
    text = run(f"pitfall_{pitfall}.py")
    if needs_gpu and not has_gpu:
        assert "needs a GPU" in text
        assert "WRONG" not in text
        return
    assert "WRONG " in text
    assert "MENDED" in text


def test_every_pitfall_is_run_by_its_step():
    listed = re.search(r"PITFALLS = \(([^)]*)\)", (FOLDER / "step6_pitfalls.py").read_text())
    assert listed is not None
    files = {file.stem.removeprefix("pitfall_") for file in FOLDER.glob("pitfall_*.py")} - {"raw"}
    assert set(re.findall(r'"(\w+)"', listed[1])) == files


@needs_compiler
def test_timing_prints_a_share_of_a_copy():
    text = run("step7_timing.py")
    assert re.search(r"share of the copy bandwidth +\d+%", text)
    assert re.search(r"after warm-up, median +[\d.]+ us", text)


def test_native_op_is_first_class():
    text = run("step8_native_op.py")
    assert "schema: opgraft::gelu(Tensor x) -> Tensor" in text
    assert "opcheck: forward and backward pass" in text
    assert "torch.export, torch.vmap, meta tensors: right" in text


@needs_compiler
def test_table_says_what_each_step_breaks(tmp_path: Path):
    text = run("run_all.py", "--json", str(tmp_path / "rows.json"))
    rows: dict[str, Any] = json.loads((tmp_path / "rows.json").read_text())["rows"]

    def answers(step: str) -> tuple[str, ...]:
        return tuple(rows[step][name] for name in ("gradient", "graph breaks", "fake", "vmap", "export"))

    assert answers("reference") == ("yes", "0", "yes", "yes", "yes")
    for step in ("step2_load_inline", "step3_extension"):
        assert answers(step) == ("lost, silently", "1", "no", "no", "no")
    assert answers("step4_torch_library") == ("yes", "0", "yes", "yes", "yes")
    assert answers("step5_autograd_function") == ("yes", "1", "no", "no", "no")
    assert answers("step8_native_op") == ("yes", "0", "yes", "yes", "yes")
    if has_triton:
        assert rows["step1_triton"]["gradient"] == "lost, silently"
    else:
        assert rows["step1_triton"] is None
        assert "pip install triton" in text
    for step, row in rows.items():
        if row is not None and (has_gpu or step != "step1_triton"):
            assert min(row["host us"], row["inference us"], row["large us"], row["share of copy"]) > 0
    assert len(re.findall(r"^\| ", text, re.MULTILINE)) == len(rows) + 1
