"""AOTInductor cannot carry the op.

**What it means.** A model with the op exports, and ``torch._inductor.aoti_compile_and_package`` fails on it, or the
package gives other values.

**Why it matters.** A server without Python cannot serve the model.

Fails: an op with a ``complex`` argument, which the package has no form for. Passes: the same op with two ``float``.

**Remedies.** ``fix-schema``, ``load-library``.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from typing import Any

import torch

from opgraft.diagnostics.conform.lab.bench import Bench, Fault, NotApplicable, NotRun, sentence
from opgraft.diagnostics.conform.lab.tree import tensors
from opgraft.diagnostics.conform.not_exportable import holder, inputs

KIND = "not-exportable"
TAIL = """\
class Model(torch.nn.Module):
    def forward(self, {names}):
        return {call}
program = torch.export.export(Model(), ({names},))
package = torch._inductor.aoti_compile_and_package(program, package_path="/tmp/model.pt2")
torch.testing.assert_close(torch._inductor.aoti_load_package(package)({names}), {call})"""


def check(bench: Bench) -> Iterator[Fault]:
    if not bench.cases[0].tensors:
        raise NotApplicable("the op takes no tensor")
    if not bench.thorough:
        raise NotRun("a package takes about half a minute to compile: --thorough")
    if not hasattr(torch._inductor, "aoti_compile_and_package"):
        raise NotRun("this torch has no torch._inductor.aoti_compile_and_package")
    case = bench.cases[0]
    wanted = bench.real(case)
    if not wanted.ok:
        raise NotRun(f"the op refuses the call: {sentence(wanted.error)}")
    bench.tell(case, doing="compile")
    try:
        with torch.no_grad():
            program = torch.export.export(holder(bench.op, case), inputs(case))
    except Exception as error:
        raise NotRun(f"the op cannot be exported: {sentence(error)}") from error
    try:
        found = _packaged(program, inputs(case))
    except Exception as error:
        yield Fault(
            f"{bench.name} cannot be packaged by AOTInductor: {sentence(error)}",
            case,
            remedies=("fix-schema",),
            severity="warning",
            tail=TAIL,
        )
        return
    if bench.facts.tagged("nondeterministic_seeded"):
        return
    words = bench.disagree(tensors(found), tensors(wanted.outputs), case)
    if words:
        yield Fault(f"{bench.name} gives other values in an AOTInductor package: {words}", case, remedies=(), tail=TAIL)


def _packaged(program: Any, args: tuple[Any, ...]) -> Any:
    from torch._inductor import config
    from torch._inductor.utils import fresh_cache

    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        stack.enter_context(fresh_cache())
        if hasattr(config.cpp, "vec_isa_ok"):
            # There is nothing but the op in the model: no loop that vector units would help.
            stack.enter_context(config.patch({"cpp.vec_isa_ok": False}))
        if hasattr(config, "cpp_cache_precompile_headers"):
            stack.enter_context(config.patch(cpp_cache_precompile_headers=False))
        path = torch._inductor.aoti_compile_and_package(program, package_path=f"{folder}/model.pt2")
        with torch.no_grad():
            return torch._inductor.aoti_load_package(path)(*args)
