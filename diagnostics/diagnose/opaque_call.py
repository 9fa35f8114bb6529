"""OG101 opaque-call: a kernel without a schema splits the graph.

What it is
----------
A call into native code (pybind11, a CPython extension, ctypes, a DLPack bridge, the launcher of a kernel language)
that takes or gives tensors and is not registered with torch. The compiler cannot see through it, so it ends the graph
before the call, runs the call from Python and starts a new graph after it.

Why it matters
--------------
Nothing fuses across the gap: the tensors at its border go through memory. Guards are checked again behind it, and a
CUDA graph ends there. In a model with the call in every layer that is two graphs a layer. If an input needs a
gradient, a raw call loses it without a word.

Example
-------
::

    import my_kernels                      # pybind11

    @torch.compile
    def block(x, w):
        return my_kernels.gelu(x @ w) * 2  # OG101: two graphs

Mended
------
::

    @torch.library.custom_op("my_kernels::gelu", mutates_args=())
    def gelu(x: torch.Tensor) -> torch.Tensor:
        return my_kernels.gelu(x.contiguous())

    @gelu.register_fake
    def _(x):
        return torch.empty_like(x, memory_format=torch.contiguous_format)

    @torch.compile
    def block(x, w):
        return gelu(x @ w) * 2             # one graph

Remedies
--------
``register-op``
    Give the kernel a schema, a fake and, where an input needs a gradient, an autograd formula. torch >= 2.11: in C++
    with the stable ABI, or in Python with ``torch.library.custom_op``. Price: one registration; a call through the
    dispatcher costs some microseconds more than the raw binding.
``hoist-host-code``
    Where the call's arguments are constants: make it once, outside. Price: its value is fixed from then on.
``leave-it``
    Where the break was measured to cost under 1 % of the step. Price: none.
"""

from __future__ import annotations

import ast
import re

from opgraft.diagnostics.diagnose import attribute
from opgraft.diagnostics.diagnose.incident import Incident, Verdict, statement
from opgraft.diagnostics.diagnose.remedies import hoist, register_op
from opgraft.diagnostics.model import Remedy

KIND = "opaque-call"


def match(incident: Incident) -> Verdict | None:
    """An incident whose root is a call of native code that takes or gives tensors, or of a foreign library."""
    called = incident.called
    if called is None or not is_opaque(incident):
        return None
    who = attribute.callee(incident)
    assert who is not None
    what = _binding(incident)
    takes = f"{who.name} ({what}) has no schema, so the compiler ends the graph before this call"
    resume = " and runs the whole frame in eager" if incident.form == "skip" else " and starts another after it"
    if incident.form == "failure":
        resume = "; with fullgraph=True that is an error"
    if attribute.is_foreign(called):
        key: tuple[object, ...] = (KIND, incident.location.path, incident.location.line)
    else:
        key = (KIND, who.name, called.file)
    return Verdict(
        kind=KIND,
        message=f"{takes}{resume}.",
        location=incident.location,
        key=key,
        severity="error" if incident.form == "failure" else "warning",
        callee=who,
        remedies=(*_constant(incident), register_op(incident)),
        evidence=_evidence(incident),
    )


def _constant(incident: Incident) -> tuple[Remedy, ...]:
    """``hoist-host-code`` for a call whose arguments are all constants: it need not be made at every step."""
    text = statement(incident.location)
    try:
        calls = [node for node in ast.walk(ast.parse(text.strip())) if isinstance(node, ast.Call)]
    except SyntaxError:
        return ()
    given = [value for call in calls for value in (*call.args, *(keyword.value for keyword in call.keywords))]
    if not calls or not all(isinstance(value, (ast.Constant, ast.Call)) for value in given) or incident.takes_tensor:
        return ()
    return (hoist(f"`{text}`", "it is called with constants alone, and need not be at every step"),)


def is_opaque(incident: Incident) -> bool:
    """True for a native callee outside torch and Python's own modules that has to do with tensors."""
    called = incident.called
    if called is None:
        return False
    if attribute.is_foreign(called):
        return True
    if not called.native or attribute.is_standard(called) or called.module.partition(".")[0] in ("torch", "numpy"):
        return False
    if called.type_module.partition(".")[0] == "torch" or attribute.is_triton(called):
        return False
    if called.type == "type":
        return False
    return incident.takes_tensor or incident.gives_tensor is True


def _binding(incident: Incident) -> str:
    called = incident.called
    assert called is not None
    if attribute.is_foreign(called):
        return "a foreign function, called through ctypes" if "ctypes" in called.module + called.type_module else "cffi"
    if (
        "pybind11" in called.name
        or "pybind11" in called.type_module
        or called.doc.startswith(called.name.rpartition(".")[2] + "(")
    ):
        return "pybind11"
    if called.type not in ("builtin_function_or_method", "type"):
        return f"a native callable object of type {called.type}"
    return "native code"


def _evidence(incident: Incident) -> tuple[str, ...]:
    called = incident.called
    assert called is not None
    lines = []
    if called.file:
        lines.append(f"{called.module} is {called.file}")
    if called.distribution:
        lines.append(f"shipped by {called.distribution}")
    elif called.module:
        lines.append(f"no installed distribution claims the module {called.module}")
    if re.match(r"[\w.]+\(.*\)( *->|$)", called.doc):
        lines.append(f"its own signature: {called.doc}")
    return tuple(lines)
