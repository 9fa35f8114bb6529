"""OG105 side-effect: a print, a log line or a warning inside the compiled region.

What it is
----------
``print``, a ``logging`` call, ``warnings.warn`` or a progress bar between tensor operations. No kernel is at fault.

Why it matters
--------------
The compiler will not reorder output against computation by itself, so the graph ends at the call, on every step, also
where the log level drops the line.

Example
-------
::

    @torch.compile
    def step(x):
        x = smooth(x)
        logger.info("smoothed")            # OG105
        return smooth(x)

Mended
------
::

    @torch.compile
    def step(x):
        return smooth(smooth(x))

    x = step(x); logger.info("smoothed twice")

Remedies
--------
``reorder-logging``
    Tell the compiler that the call may move or go. torch >= 2.11:
    ``torch._dynamo.config.reorderable_logging_functions.add( print)`` for plain functions (the text then comes after
    the region); ``config.ignore_logging_functions`` and ``config.ignore_logger_methods`` drop the call while
    compiled. Price: order, or the line itself.
``hoist-host-code``
    Move the call out of the region, or put it under ``if not torch.compiler.is_compiling():``. For a warning: stop
    causing it.
"""

from __future__ import annotations

import re

from opgraft.diagnostics.collect.events import Called
from opgraft.diagnostics.diagnose import attribute
from opgraft.diagnostics.diagnose.incident import Incident, Verdict, statement
from opgraft.diagnostics.diagnose.remedies import hoist
from opgraft.diagnostics.model import Remedy

KIND = "side-effect"
_TYPES = ("attempted to reorder a debugging function", "Logger not supported", "Unsupported logger")
_MODULES = (
    "logging",
    "warnings",
    "_warnings",
    "tqdm",
    "pprint",
    "traceback",
    "loguru",
    "rich",
    "progressbar",
    "alive_progress",
    "structlog",
)
_FILE = re.compile(r"filename: \S*?[/\\](?:site|dist)-packages[/\\](tqdm|loguru|rich|progressbar|alive_progress)[/\\]")
_WORDS = re.compile(r"\b(logging\.|Logger\.|logger\.|warnings\.|_warnings\.)|`?print`?\b")


def match(incident: Incident) -> Verdict | None:
    """An incident at an output call."""
    name = _output(incident)
    if not name:
        return None
    advice = "print or log after the step, or guard it with `if not torch.compiler.is_compiling():`"
    if "warn" in name:
        advice = "stop triggering it (the newer argument or call), or warn once when the model is built"
    if any(bar in name for bar in ("tqdm", "progressbar", "alive_progress")):
        advice = "show progress around the calls of the compiled region, one call a step"
    hoisted = hoist(f"`{statement(incident.location)}`", advice)
    return Verdict(
        kind=KIND,
        message=f"{name} writes output in the middle of the compiled region, so the graph ends here on every step. "
        "No kernel is at fault.",
        location=incident.location,
        key=(KIND, incident.location.path, incident.location.line),
        severity="error" if incident.form == "failure" else "warning",
        callee=attribute.callee(incident),
        remedies=(*_reorder(name, incident.called), hoisted),
    )


def _output(incident: Incident) -> str:
    called = incident.called
    if called is not None:
        top = called.module.partition(".")[0]
        name = called.name.rpartition(".")[2]
        if top in _MODULES or called.type_module.partition(".")[0] in _MODULES:
            return attribute.short_name(called)
        if called.module == "builtins" and name == "print":
            return "print"
        if called.type == "TextIOWrapper" or (called.module == "_io" and name in ("write", "flush", "writelines")):
            return f"a write to a stream ({name})"
    if incident.gb_type.startswith(_TYPES):
        return "this log call"
    if incident.root is not None and (shipped := _FILE.search(incident.root.context)):
        return f"this call into {shipped[1]}"
    if any(
        f"/{module}/" in frame.path or frame.path.endswith(f"/{module}.py")
        for frame in incident.stack[-3:]
        for module in ("logging", "warnings", "tqdm")
    ):
        return "a log or warning call"
    if incident.root is not None and "module:" in incident.root.context:
        found = _WORDS.search(incident.root.context)
        if found:
            return found[0].rstrip(".")
    return ""


def _reorder(name: str, called: Called | None) -> tuple[Remedy, ...]:
    """torch's settings that reorder or drop the call; none for a progress bar, which is no single call."""
    if any(bar in name for bar in ("tqdm", "progressbar", "alive_progress")):
        return ()
    if "warn" in name:
        text = "torch._dynamo.config.ignore_logging_functions.add(warnings.warn) drops the call while compiled"
    elif "ogger" in name or name.startswith(("logging", "loguru", "structlog")):
        text = (
            "torch._dynamo.config.ignore_logger_methods.add(...) or ignore_logging_functions.add(...) drops the call "
            "while compiled"
        )
    else:
        text = f"torch._dynamo.config.reorderable_logging_functions.add({name}) lets the output come after the region"
    return (Remedy(id="reorder-logging", text=text, price="the order of output and computation, or the line itself"),)
