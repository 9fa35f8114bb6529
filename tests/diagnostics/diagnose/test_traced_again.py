"""A program that ends because compiled code is traced again: a finding, and none where something else ended it."""

from __future__ import annotations

import pytest

from opgraft.diagnostics.collect.events import Began, Event, Failed, Raised
from opgraft.diagnostics.diagnose.report import diagnose
from opgraft.diagnostics.model import Location

TORCH = "/env/torch"
USER = Location(path="/home/me/train.py", line=9, function="main")
REFUSED = "Detected that you are using FX to symbolically trace a dynamo-optimized function. Not supported."
NO_DATA = "Cannot access data pointer of Tensor (e.g. FakeTensor, FunctionalTensor)."


def ended(text: str, *torch_files: str, kind: str = "builtins.RuntimeError") -> list[Event]:
    frames = tuple(Location(path=f"{TORCH}{path}", line=1, function="f") for path in torch_files)
    return [Began(prefixes=("/env",)), Raised(type=kind, text=text, stack=(USER, *frames))]


@pytest.mark.parametrize(
    ("text", "files", "words"),
    [
        (REFUSED, ("/fx/experimental/proxy_tensor.py", "/fx/_symbolic_trace.py", "/_dynamo/eval_frame.py"), "make_fx"),
        (REFUSED, ("/_dynamo/eval_frame.py",), "a tracer"),
        (NO_DATA, ("/export/_trace.py", "/_dynamo/eval_frame.py", "/_inductor/utils.py"), "torch.export"),
    ],
)
def test_the_callers_line_is_named(text: str, files: tuple[str, ...], words: str) -> None:
    (found,) = diagnose(ended(text, *files)).findings
    assert (found.kind, found.severity, found.location) == ("other-break", "error", USER)
    assert f"{words} traces it again" in found.message


@pytest.mark.parametrize(
    "stream",
    [
        ended(REFUSED, "/nn/modules/module.py"),
        ended("CUDA out of memory", "/_inductor/utils.py"),
        ended(NO_DATA, "/_ops.py"),
        ended("two sizes", "/_dynamo/eval_frame.py", kind="builtins.ValueError"),
    ],
)
def test_other_errors_are_no_finding(stream: list[Event]) -> None:
    assert diagnose(stream).findings == ()


def test_a_failed_compile_explains_the_error_itself() -> None:
    began, raised = ended(REFUSED, "/_dynamo/eval_frame.py")
    failed = Failed(id="0/0", type="torch._dynamo.exc.Unsupported", text="no", stack=(USER,))
    (found,) = diagnose([began, failed, raised]).findings
    assert "traces it again" not in found.message
