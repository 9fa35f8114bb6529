"""OG109 other-break: a break, or a failed compile, with no custom kernel in it.

What it is
----------
Everything else that ends a graph: Python that the compiler does not know yet, an operator of torch's own that cannot be
traced, a higher-order operator used in a way it forbids.

Why it matters
--------------
torch's message sometimes advises to register or fix a custom kernel here. There is none.

Example
-------
::

    y = torch.cond(score > 0, left, right, (h,))   # the branches give different strides

Mended
------
::

    y = torch.cond(score > 0, left, lambda t: right(t).contiguous(), (h,))

Remedies
--------
``torch-hint``
    torch's own advice for this cause, where it has any.
``leave-it``
    Where the break is cheap.
"""

from __future__ import annotations

import re

from opgraft.diagnostics.collect.place import changeable
from opgraft.diagnostics.diagnose import attribute
from opgraft.diagnostics.diagnose.incident import Incident, Verdict, statement
from opgraft.diagnostics.diagnose.remedies import is_advice, leave_it, torch_hint
from opgraft.diagnostics.model import Remedy

KIND = "other-break"
_GRAPH_BREAK = "Call to `torch._dynamo.graph_break()`"
_ADVICE = {
    "Unsupported Tensor.backward() call": "call backward() behind the compiled region: the compiler makes the backward "
    "of the region all the same",
    _GRAPH_BREAK: "remove the call of torch._dynamo.graph_break(), or compile what lies before and after it apart",
    "Unsupported context manager": "enter the context around the call of the compiled region",
}
"""What torch's own hints miss, for causes that are met often."""
_TELLS = re.compile(r"(?:To fix this|Please |Consider |Try |Did you mean )[^.]*(?:\.\w[^.]*)*\.")


def match(incident: Incident) -> Verdict | None:
    """Any incident: the last rule."""
    root = incident.root
    said = root.gb_type if root is not None else _first_line(incident)
    if said == _GRAPH_BREAK and incident.stack and not changeable(incident.stack[-1].path, incident.prefixes):
        return _deliberate(incident)
    if incident.form == "failure":
        message = f"The compile fails here: {_failure(incident)}."
    elif incident.form == "skip":
        message = f"The compiler stops here and runs the whole frame in eager: {said}."
    else:
        message = f"The graph ends here: {said}."
    evidence: tuple[str, ...] = ()
    if "custom" in incident.text.lower() and not incident.custom_ops:
        evidence = ("torch's message speaks of a custom kernel; no custom op or kernel takes part here",)
    who = attribute.callee(incident)
    return Verdict(
        kind=KIND,
        message=" ".join(message.split())[:600],
        location=incident.location,
        key=(KIND, incident.location.path, incident.location.line, said),
        severity="error" if incident.form == "failure" else "warning",
        callee=None if said == _GRAPH_BREAK else who,
        remedies=_remedies(incident, said),
        evidence=evidence,
    )


def _remedies(incident: Incident, said: str) -> tuple[Remedy, ...]:
    root = incident.root
    known = _ADVICE.get(said, "") or _skipped_in_torch(incident) or _told_in_the_error(incident)
    first = Remedy(id="torch-hint", text=known) if known else torch_hint(root.hints if root is not None else ())
    keep = leave_it("keep it where the break is cheap")
    if incident.form == "failure":
        return (first,)
    return (first, keep) if known or (root is not None and is_advice(root.hints)) else (keep, first)


def _skipped_in_torch(incident: Incident) -> str:
    """A function of torch's own in a file that the tracer is kept out of: what torch hints at is no way out."""
    who = attribute.callee(incident)
    if not incident.gb_type.startswith("Attempted to call function marked as skipped") or who is None:
        return ""
    if who.name.partition(".")[0] != "torch":
        return ""
    return f"torch keeps its tracer out of {who.name}: call it outside the compiled region"


def _told_in_the_error(incident: Incident) -> str:
    """The advice that an error's own text gives, where torch adds no hints."""
    if incident.form != "failure" or (incident.root is not None and incident.root.hints):
        return ""
    found = _TELLS.search(" ".join(incident.error.split()))
    return found[0][:400] if found else ""


def _deliberate(incident: Incident) -> Verdict:
    """torch's own code asks for the break."""
    inner = next((f for f in reversed(incident.stack) if "/_dynamo/" not in f.path), incident.stack[-1])
    return Verdict(
        kind=KIND,
        message=f"torch itself ends the graph in {inner.function} ({inner.path.rpartition('/')[2]}:{inner.line}), "
        f"which `{statement(incident.location)}` calls. The break is deliberate; nothing of yours is at fault.",
        location=incident.location,
        key=(KIND, incident.location.path, incident.location.line, "torch's own"),
        severity="error" if incident.form == "failure" else "warning",
        remedies=(
            leave_it("keep it: the code behind it is compiled as a region of its own"),
            Remedy(id="torch-hint", text="compile this call by itself, apart from the rest of the region"),
        ),
    )


def _first_line(incident: Incident) -> str:
    text = (incident.error or incident.reason).strip().splitlines()
    return text[0] if text else "torch gives no reason"


def _failure(incident: Incident) -> str:
    root = incident.root
    if root is None:
        return _first_line(incident).rstrip(".")
    words = root.explanation or root.context or root.gb_type
    _, _, got = words.partition("got ")
    return (got or words).strip().rstrip(".")
