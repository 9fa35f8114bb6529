"""OG104 data-branch: Python chooses a path by a tensor's value.

What it is
----------
``if``, ``while``, ``assert``, ``and``/``or`` or a conditional expression on a tensor.

Why it matters
--------------
The compiler cannot follow both paths of Python code, so the graph ends at the test, the value travels to the host,
and each path becomes graphs of its own.

Example
-------
::

    if h.norm() > 10:                      # OG104
        h = h / h.norm()

Mended
------
::

    norm = h.norm()
    h = torch.where(norm > 10, h / norm, h)

Remedies
--------
``use-torch-cond``
    ``torch.cond(predicate, yes, no, operands)``, or ``torch.while_loop`` for a loop. torch >= 2.11. Price: both paths
    must give tensors of the same shape, dtype and strides, and may not mutate their inputs.
``keep-on-device``
    ``torch.where`` over both results. Price: both are computed.
"""

from __future__ import annotations

from opgraft.diagnostics.diagnose.incident import Incident, Verdict
from opgraft.diagnostics.model import Remedy

KIND = "data-branch"
_TYPES = ("Data-dependent branching", "Data-dependent assertion failed", "Data-dependent jump")


def match(incident: Incident) -> Verdict | None:
    """An incident at a jump on a tensor's value."""
    if not incident.gb_type.startswith(_TYPES) and "generic_jump" not in incident.gb_type:
        return None
    word = incident.location.text.split()[0] if incident.location.text.split() else "this statement"
    loop = word == "while"
    text = (
        "torch.while_loop(condition, body, operands)"
        if loop
        else "torch.cond(predicate, yes, no, operands), both giving tensors of one shape, dtype and layout"
    )
    if word == "assert":
        text = "torch._assert_async(condition) checks on the device; torch.cond where a path depends on it"
    return Verdict(
        kind=KIND,
        message=f"Python's control flow ({word.rstrip(':')}) depends on a tensor's value: the graph ends at the test, "
        "and each path is compiled by itself.",
        location=incident.location,
        key=(KIND, incident.location.path, incident.location.line),
        severity="error" if incident.form == "failure" else "warning",
        remedies=(
            Remedy(id="use-torch-cond", text=text, price="both paths are traced and may not mutate their inputs"),
            Remedy(
                id="keep-on-device",
                text="compute both results and pick with torch.where, or multiply by the condition",
                price="both paths are computed",
            ),
        ),
    )
