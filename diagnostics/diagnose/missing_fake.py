"""OG201 missing-fake: an op without a fake kernel.

What it is
----------
The compiler runs every op on fake tensors first, to learn shapes, dtypes and strides. An op that has no fake kernel
cannot be run so. For an op made with ``Library.define`` that is a graph break; for one made with
``torch.library.custom_op`` the compile fails.

Why it matters
--------------
The op is registered, and still breaks the graph or the program. Where one op calls another, the inner one is at
fault, and perhaps only for one shape.

Example
-------
::

    @torch.library.custom_op("my::gemm", mutates_args=())
    def gemm(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor: ...
    torch.compile(lambda x, w: gemm(x, w))(x, w)       # OG201

Mended
------
::

    @gemm.register_fake
    def _(x, w):
        return x.new_empty(x.shape[0], w.shape[0])

Remedies
--------
``add-fake``
    ``torch.library.register_fake("ns::op")`` (torch >= 2.11) with a function that gives the outputs' shape, dtype,
    device and strides, from the sizes of the inputs and nothing else. Price: a few lines. An op whose kernel is
    registered as CompositeImplicitAutograd must be moved to CPU or CUDA first.
"""

from __future__ import annotations

import re

from opgraft.diagnostics.collect.trace import OWN_NAMESPACES
from opgraft.diagnostics.diagnose.incident import Incident, Verdict
from opgraft.diagnostics.model import Callee, Remedy

KIND = "missing-fake"
_PATTERNS = (
    re.compile(r"no fake impl registered for <CustomOpDef\((?P<op>[\w:.]+)\)>"),
    re.compile(r"unsupported operator: (?P<op>[\w.]+)"),
    re.compile(r"no fake impl (?:or Meta kernel )?registered for (?:operator )?[`'\"]?(?P<op>[\w]+(?:::|\.)[\w.]+)"),
    re.compile(r"(?P<op>[\w]+(?:::|\.)[\w.]+)[^\n]{0,80}there was no fake impl", re.IGNORECASE),
    re.compile(r"Custom op missing fake impl[^\n]*\n[^\n]*?(?P<op>[\w]+(?:::|\.)[\w.]+)"),
    re.compile(r"Could not run '(?P<op>[\w:.]+)' with arguments from the 'Meta' backend"),
    re.compile(r"Multiple dispatch failed for '(?:torch\._ops\.)?(?P<op>[\w.]+)'"),
)


def match(incident: Incident) -> Verdict | None:
    """An incident that names an op outside torch without a fake kernel."""
    op = missing_op(incident.text)
    if not op:
        return None
    namespace = op.partition("::")[0]
    if namespace in OWN_NAMESPACES:
        return None
    fails = incident.form == "failure"
    effect = "so the compile fails" if fails else "so the graph ends at its call"
    return Verdict(
        kind=KIND,
        message=f"{op} has no fake kernel: the compiler cannot know the shape of its result, {effect}.",
        location=incident.deepest,
        key=(KIND, op),
        severity="error" if fails else "warning",
        callee=Callee(name=op, distribution=_distribution(incident), owner="op"),
        remedies=(
            Remedy(
                id="add-fake",
                text=f'torch.library.register_fake("{op}") with a function of the inputs\' sizes that gives the '
                "outputs' shape, dtype, device and strides",
                price="a few lines; it must agree with the kernel for every size",
            ),
        ),
        evidence=(f"torch says: {_said(incident)}",),
    )


def missing_op(text: str) -> str:
    """The qualified name of the op that a message of torch's calls without a fake, "" if it calls none so."""
    for pattern in _PATTERNS:
        found = pattern.search(text)
        if found:
            return qualified(found["op"])
    return ""


def qualified(name: str) -> str:
    """``ns::op`` from ``ns.op.default``, ``ns::op`` or ``torch.ops.ns.op``."""
    name = name.removeprefix("torch.ops.").rstrip(".")
    if "::" in name:
        return name.partition(".")[0]
    parts = name.split(".")
    return "::".join(parts[:2]) if len(parts) > 1 else name


def _distribution(incident: Incident) -> str:
    called = incident.called
    return (called.distribution if called is not None else "") or "unknown"


def _said(incident: Incident) -> str:
    root = incident.root
    words = (root.context or root.explanation) if root is not None else incident.error
    return " ".join(words.split())[:300]
