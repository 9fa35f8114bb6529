"""OG802 data-dependent-shape: the size of a result depends on the data.

What it is
----------
``nonzero``, boolean indexing, ``unique``, non-maximum suppression, an op whose fake asks for a new dynamic size or
that returns a number.

Why it matters
--------------
The compiler cannot know the size, so by default the graph ends at the op. Told to carry on, it works with an unknown
number, and whatever needs to compare that number fails next.

Example
-------
::

    keep = suppress(boxes, scores, 0.3)       # OG802: as many rows as survive
    return boxes[keep]

Mended
------
::

    keep, count = suppress_padded(boxes, scores, 0.3, limit=100)   # always 100 rows and a count on the device

Remedies
--------
``use-upper-bound``
    A fixed number of rows with a mask or a count on the device. Price: some padding.
``capture-dynamic-size``
    ``torch._dynamo.config.capture_dynamic_output_shape_ops = True`` (torch >= 2.11), for an op with a correct fake.
    Price: what follows must not ask for the size; ``torch._check`` gives bounds.
``declare-dynamic-size``
    In the op's fake: ``torch.library.get_ctx().new_dynamic_size()``.
``read-shape``
    Where the size follows from shapes after all, compute it in Python from them.
"""

from __future__ import annotations

import re

from opgraft.diagnostics.diagnose.incident import Incident, Verdict, statement
from opgraft.diagnostics.diagnose.missing_fake import qualified
from opgraft.diagnostics.model import Callee, Remedy

KIND = "data-dependent-shape"
_TYPES = (
    "Dynamic shape operator",
    "Dynamic slicing with Tensor arguments",
    "Attempted to use `torch.nn.functional.one_hot` with data-dependent output shape",
    "Data-dependent uint64 torch.Size element",
    "Unhinted data-dependent torch.Size",
    "Attempted to wrap unbacked SymInt",
)
_WORDS = re.compile(
    r"Could not (?:guard on|extract specialized integer from) data-dependent expression|unbacked symint", re.I
)
_OPERATOR = re.compile(r"^(?:unsupported operator: |torch\.ops\.)?(?P<op>[A-Za-z_]\w*(?:\.\w+){1,2})$")


def match(incident: Incident) -> Verdict | None:
    """An incident at an op whose result has a size that no shape gives."""
    root = incident.root
    if root is None and not _WORDS.search(incident.error):
        return None
    if not incident.gb_type.startswith(_TYPES) and not _WORDS.search(incident.text):
        return None
    found = _OPERATOR.match(root.context.strip()) if root is not None else None
    op = qualified(found["op"]) if found else ""
    own = bool(op) and not op.startswith(("aten::", "torchvision::"))
    name = op or "an operator here"
    fails = incident.form == "failure"
    return Verdict(
        kind=KIND,
        message=f"The size of what {name} gives depends on the data, so "
        + ("the compile fails where the size is needed." if fails else "the graph ends here."),
        location=incident.location,
        key=(KIND, incident.location.path, incident.location.line),
        severity="error" if fails else "warning",
        callee=Callee(name=op, owner="op" if own else "torch") if op else None,
        remedies=_remedies(op, incident),
        evidence=("the limit holds for torch's own ops alike: the op is not at fault",) if not own else (),
    )


_UPPER_BOUND = {
    "aten::nonzero": "torch.nonzero_static(x, size=rows, fill_value=...) gives a fixed number of rows",
    "aten::masked_select": "torch.where(mask, x, 0) keeps every row",
    "aten::repeat_interleave": "repeat_interleave(..., output_size=rows) takes the number of rows from Python",
    "aten::bincount": "torch.zeros(classes).scatter_add_(0, index, ones) has one row for each class",
}


def _remedies(op: str, incident: Incident) -> tuple[Remedy, ...]:
    """The remedies with the fixed-size form of the very operator first, where it has one."""
    known = _UPPER_BOUND.get(op, "")
    if op == "aten::nonzero" and "nonzero" not in statement(incident.location):  # x[mask] asks for it too
        known = "torch.where(mask, x, 0) or multiplying by the mask keeps every row"
    text = "give a fixed number of rows with a mask or a count on the device, and cut after the compiled region"
    first = Remedy(id="use-upper-bound", text=f"{known}; or {text}" if known else text, price="some padding")
    return (first, *_OTHERS)


_OTHERS = (
    Remedy(
        id="capture-dynamic-size",
        text="torch._dynamo.config.capture_dynamic_output_shape_ops = True; torch._check gives bounds",
        price="what follows must not ask for the size",
    ),
    Remedy(
        id="read-shape",
        text="where the size follows from the inputs' shapes after all, compute it in Python from them",
        price="none",
    ),
)
