"""OG102 host-code: Python around a kernel that cannot be traced.

What it is
----------
The kernel is fine, the Python that leads to it is not: a capability query, a build on first use, an option object, a
pointer or stream access, a lock, a subprocess, generated source. The statement neither takes nor gives tensors, yet
the compiler has to stop at it.

Why it matters
--------------
It costs a graph break every time the frame runs, for a value that does not change between steps. torch's message
often names a function of the standard library, or advises to wrap a kernel: there is none to wrap.

Example
-------
::

    @torch.compile
    def norm(x):
        if my_kernels.capability() >= 90:  # OG102: asks the device on every call
            x = x.bfloat16()
        return F.layer_norm(x, x.shape[-1:])

Mended
------
::

    FAST = my_kernels.capability() >= 90   # asked once, when the module is imported

    @torch.compile
    def norm(x):
        if FAST:
            x = x.bfloat16()
        return F.layer_norm(x, x.shape[-1:])

Remedies
--------
``hoist-host-code``
    Move the statement to where the model is built or loaded, and keep its result. torch >= 2.11. Price: the value is
    fixed from then on. A build on first use is hoisted by calling it once before compiling.
``register-op``
    Where the statement must run with the kernel each time: move both inside an op, which the compiler calls without
    looking in.
"""

from __future__ import annotations

import re

from opgraft.diagnostics.diagnose import attribute
from opgraft.diagnostics.diagnose.incident import Incident, Verdict, statement
from opgraft.diagnostics.diagnose.remedies import hoist, register_op

KIND = "host-code"
_STATE_QUERIES = ("torch.backends", "torch.cuda", "torch._C", "torch.xpu", "torch.mps", "torch.version", "torch.utils")
_POINTERS = ("data_ptr", "untyped_storage", "storage", "__dlpack__", "cuda_stream", "current_stream", "_cdata")
_TYPES = ("Call to a time function", "ContextVar mutation not supported", "Import failure", "Unsupported inspect call")


_CLOCKS = ("time", "datetime", "timeit")
_HELD = re.compile(r"\b(_?R?[Ll]ock|Condition|(?:Bounded)?Semaphore|TextIOWrapper|Buffered\w+|FileIO|socket)\)")


def match(incident: Incident) -> Verdict | None:
    """An incident at a call that has nothing to do with tensors, or at an access to a pointer or a stream."""
    reason = _reason(incident)
    if not reason:
        return None
    who = attribute.callee(incident)
    name = who.name if who is not None and who.name else f"`{statement(incident.location)}`"
    key: tuple[object, ...] = (KIND, name, incident.location.path)
    if who is None or who.owner in ("user", "torch") or reason != _NATIVE:
        key = (KIND, incident.location.path, incident.location.line)
    hoisted = hoist(f"`{statement(incident.location)}`", _advice(incident))
    around_kernel = register_op(incident, "the wrapper from here to the kernel")
    return Verdict(
        kind=KIND,
        message=f"{name} {reason}. It is Python on the host, not a kernel: the graph ends here for a value that "
        "does not come from tensors.",
        location=incident.location,
        key=key,
        severity="error" if incident.form == "failure" else "warning",
        callee=who,
        remedies=(hoisted,) if reason in _NEVER_A_KERNELS else (hoisted, around_kernel),
        evidence=("no tensor goes in or comes out of the call",) if reason == _NATIVE else (),
    )


_NATIVE = "is native code that neither takes nor gives tensors"
_CLOCK = "reads the clock"
_RANDOM = "draws a random number on the host"
_NEVER_A_KERNELS = (_CLOCK, _RANDOM)


def _reason(incident: Incident) -> str:
    called = incident.called
    if incident.gb_type in _TYPES:
        return _CLOCK if "time" in incident.gb_type else "cannot be traced"
    held = _held(incident)
    if held:
        return held
    if called is None:
        return ""
    name = called.name.rpartition(".")[2]
    if called.method in _POINTERS or name in _POINTERS:
        return "reads a pointer, a storage or a stream"
    if incident.takes_tensor or incident.gives_tensor is True:
        return ""
    if called.module.startswith("torch.utils.cpp_extension"):
        return "builds a kernel on first use"
    if called.module.startswith(_STATE_QUERIES) or (called.module == "torch" and called.native):
        return "asks for the state of the machine or of torch"
    if called.module in _CLOCKS and name != "sleep":
        return _CLOCK
    if called.module in ("random", "_random", "secrets", "uuid", "numpy.random"):
        return _RANDOM
    if called.module in ("subprocess", "os", "posix", "_posixsubprocess", "shutil", "socket", "pathlib", "io", "_io"):
        return "talks to the operating system"
    if called.module in ("threading", "_thread", "multiprocessing", "asyncio", "queue", "_queue"):
        return "takes a lock or starts a thread"
    if called.module == "builtins" and called.name in ("exec", "eval", "compile", "open", "__import__", "input"):
        return f"calls {called.name}()"
    if _through_standard_library(incident):
        return "runs code of the standard library that cannot be traced"
    if called.native and not attribute.is_standard(called) and called.module.partition(".")[0] != "torch":
        return _NATIVE
    if called.native and attribute.is_standard(called) and called.module not in ("builtins",):
        return "is a function of Python's own that cannot be traced"
    return ""


def _held(incident: Incident) -> str:
    """A ``with`` over a lock or a file: a context manager of Python's own."""
    root = incident.root
    if root is None or not root.gb_type.startswith("Unsupported context manager"):
        return ""
    found = _HELD.search(root.context)
    if not found:
        return ""
    locks = "ock" in found[1] or found[1].endswith(("Condition", "Semaphore"))
    return "takes a lock" if locks else "holds a file or a connection open"


def _through_standard_library(incident: Incident) -> bool:
    """The break lies in a file of the standard library that the reader's statement led to."""
    stack = incident.stack
    return bool(stack) and bool(re.search(r"/lib/python3\.\d+/(?!site-packages|dist-packages)", stack[-1].path))


def _advice(incident: Incident) -> str:
    called = incident.called
    module = called.module if called is not None else ""
    if _reason(incident) == _CLOCK:
        return "take the time around the call of the compiled region, or use torch.profiler"
    if _reason(incident) == _RANDOM:
        return "draw it before the call and pass it in, or draw a tensor with torch.rand inside"
    if _held(incident):
        return "hold it around the call of the compiled region"
    if module.startswith("torch.utils.cpp_extension"):
        return "build it when the module is imported, or call it once before compiling"
    if module in ("subprocess", "os", "shutil") or _through_standard_library(incident):
        return "do it once when the module is imported or the model is built, or call it once before compiling"
    if called is not None and called.name in ("exec", "eval", "compile"):
        return "generate the function once for the sizes that occur and keep it"
    return "ask once when the model is built and keep the answer"
