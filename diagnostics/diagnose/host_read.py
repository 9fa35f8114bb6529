"""OG103 host-read: a tensor's value is read by Python.

What it is
----------
``.item()``, ``.tolist()``, ``.cpu()`` and ``.numpy()``, ``int()`` or ``float()`` of a tensor, or a tensor given where
an op's schema wants a number.

Why it matters
--------------
The compiler knows shapes, not values, so the graph ends at the read. On a GPU the host also waits until everything
queued before it has run.

Example
-------
::

    longest = lengths.max().item()         # OG103
    y = attend(qkv, starts, longest)

Mended
------
::

    longest = x.shape[1]                   # all rows are this long: the shape knows
    y = attend(qkv, starts, longest)

Remedies
--------
``read-shape``
    Where the value is a size or a count that a shape already holds. Price: none.
``keep-on-device``
    Use the value as a tensor (arithmetic, ``torch.where``, an op with a tensor argument). Price: none.

``torch._dynamo.config.capture_scalar_outputs = True`` (torch >= 2.11) keeps the graph whole with a symbol for the
value; the wait for the device stays, and what is then sliced or viewed by that symbol is often the next break."""

from __future__ import annotations

import re

from opgraft.diagnostics.diagnose import attribute
from opgraft.diagnostics.diagnose.incident import Incident, Verdict
from opgraft.diagnostics.diagnose.remedies import KEEP_ON_DEVICE
from opgraft.diagnostics.model import Location, Remedy

KIND = "host-read"
_TYPES = (
    "Unsupported Tensor.item() call",
    "Data dependent operator",
    "Tensor.tolist()",
    "Tensor.numpy()",
    "Unsupported Tensor.tolist",
    "Indexing list with non-scalar tensor",
)
_READS = re.compile(r"\.(item|tolist|cpu|numpy)\(|\b(int|float|bool)\(")
_SCHEMA_NUMBER = re.compile(
    r"(?P<op>[\w:.]+)\(\) Expected a value of type '(?P<type>int|float|bool|number)' for argument '(?P<argument>\w+)' "
    r"but instead found type 'FakeTensor'"
)


def match(incident: Incident) -> Verdict | None:
    """An incident at a read of a tensor's value on the host."""
    number = _SCHEMA_NUMBER.search(incident.text)
    if number:
        return _tensor_for_number(incident, number)
    if not incident.gb_type.startswith(_TYPES):
        return None
    place = incident.deepest
    what = _read(place)
    return Verdict(
        kind=KIND,
        message=f"{what} reads a tensor's value on the host: the compiler knows shapes, not values, so the graph ends "
        "here; on a GPU the host waits for the device as well.",
        location=place,
        key=(KIND, place.path, place.line),
        severity="error" if incident.form == "failure" else "warning",
        callee=attribute.callee(incident) if place == incident.location else None,
        remedies=(_read_shape(), KEEP_ON_DEVICE),
        evidence=(
            "torch's advice, capture_scalar_outputs, keeps the graph whole but not the wait; slices by the value may "
            "break next",
        ),
    )


def _tensor_for_number(incident: Incident, found: re.Match[str]) -> Verdict:
    text = (
        f"compute {found['argument']} from a shape or in Python before the call, or let the schema take a Tensor "
        f"{found['argument']} that the kernel reads itself"
    )
    return Verdict(
        kind=KIND,
        message=f"{found['op']} is given a tensor for its {found['type']} argument {found['argument']!r}. Eager reads "
        "the value silently; the compiler has no value to read, so the compile fails.",
        location=incident.location,
        key=(KIND, incident.location.path, incident.location.line),
        severity="error",
        callee=attribute.callee(incident),
        remedies=(_read_shape(), Remedy(id="keep-on-device", text=text, price="one change of the op's schema")),
        evidence=("the op is registered and has a fake: nothing is missing there",),
    )


def _read(place: Location) -> str:
    found = _READS.search(place.text)
    if not found:
        return "this statement"
    return f".{found[1]}()" if found[1] else f"{found[2]}(tensor)"


def _read_shape() -> Remedy:
    return Remedy(
        id="read-shape",
        text="if the value is a size or a count that a shape holds, take it from the shape (x.shape[...])",
        price="none",
    )
