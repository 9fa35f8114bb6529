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

from opgraft.diagnostics.collect.place import changeable
from opgraft.diagnostics.diagnose.incident import Incident, Verdict, statement
from opgraft.diagnostics.model import Remedy

KIND = "data-branch"
_TYPES = ("Data-dependent branching", "Data-dependent assertion failed", "Data-dependent jump")


def match(incident: Incident) -> Verdict | None:
    """An incident at a jump on a tensor's value."""
    if not incident.gb_type.startswith(_TYPES) and "generic_jump" not in incident.gb_type:
        return None
    word = (incident.location.text.split() or ["this statement"])[0]
    check = word == "assert" or (incident.root is not None and incident.root.raises)
    if incident.stack and not changeable(incident.stack[-1].path, incident.prefixes):
        return _inside_torch(incident, check)
    message = "the graph ends at the test, and each path is compiled by itself."
    if check:
        message = "it is a check that only raises, and the graph ends at it on every step."
    return Verdict(
        kind=KIND,
        message=f"Python's control flow ({word.rstrip(':')}) depends on a tensor's value: {message}",
        location=incident.location,
        key=(KIND, incident.location.path, incident.location.line),
        severity="error" if incident.form == "failure" else "warning",
        remedies=_CHECK if check else (_loop() if word == "while" else _COND, _PICK),
    )


def _inside_torch(incident: Incident, check: bool) -> Verdict:
    """The test lies in a function of torch's that the reader's statement calls."""
    inner = incident.stack[-1]
    what = "checks" if check else "branches on"
    call = statement(incident.location)
    return Verdict(
        kind=KIND,
        message=f"{inner.function}, which `{call}` calls, {what} a tensor's value in Python "
        f"({inner.path.rpartition('/')[2]}:{inner.line}): the graph ends there.",
        location=incident.location,
        key=(KIND, incident.location.path, incident.location.line),
        severity="error" if incident.form == "failure" else "warning",
        remedies=(
            Remedy(
                id="keep-on-device",
                text="call it with arguments for which it has nothing to test (checks such as error_if_nonfinite or "
                "validate_args switched off), or call it outside the compiled region",
                price="none",
            ),
            _COND,
        ),
    )


def _loop() -> Remedy:
    return Remedy(
        id="use-torch-cond",
        text="torch.while_loop(condition, body, operands)",
        price="the body is traced once and may not mutate its inputs",
    )


_COND = Remedy(
    id="use-torch-cond",
    text="torch.cond(predicate, yes, no, operands), both giving tensors of one shape, dtype and layout",
    price="both paths are traced and may not mutate their inputs",
)
_PICK = Remedy(
    id="keep-on-device",
    text="compute both results and pick with torch.where, or multiply by the condition",
    price="both paths are computed",
)
_CHECK = (
    Remedy(
        id="keep-on-device",
        text="torch._assert_async(condition, message) checks on the device without ending the graph; or check the "
        "result behind the compiled region, every now and then",
        price="the error comes later than the statement, on a GPU when the host next waits",
    ),
    Remedy(
        id="use-torch-cond",
        text="where a path follows from the check after all: torch.cond(predicate, yes, no, operands)",
        price="both paths are traced and may not mutate their inputs",
    ),
)
