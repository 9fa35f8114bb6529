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

from opgraft.diagnostics.diagnose import attribute
from opgraft.diagnostics.diagnose.incident import Incident, Verdict
from opgraft.diagnostics.diagnose.remedies import leave_it, torch_hint

KIND = "other-break"


def match(incident: Incident) -> Verdict | None:
    """Any incident: the last rule."""
    root = incident.root
    said = root.gb_type if root is not None else _first_line(incident)
    if incident.form == "failure":
        message = f"The compile fails here: {_failure(incident)}."
    elif incident.form == "skip":
        message = f"The compiler stops here and runs the whole frame in eager: {said}."
    else:
        message = f"The graph ends here: {said}."
    evidence: tuple[str, ...] = ()
    if "custom" in incident.text.lower() and not incident.custom_ops:
        evidence = ("torch's message speaks of a custom kernel; no custom op or kernel takes part here",)
    return Verdict(
        kind=KIND,
        message=" ".join(message.split())[:600],
        location=incident.location,
        key=(KIND, incident.location.path, incident.location.line, said),
        severity="error" if incident.form == "failure" else "warning",
        callee=attribute.callee(incident),
        remedies=(
            torch_hint(root.hints if root is not None else ()),
            leave_it("keep it where the break is cheap"),
        )
        if incident.form != "failure"
        else (torch_hint(root.hints if root is not None else ()),),
        evidence=evidence,
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
