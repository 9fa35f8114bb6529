"""OG106 disabled: the break is a decision.

What it is
----------
A function that somebody keeps away from the compiler: ``torch.compiler.disable``, a skipped file, or a library that
does so for its own modules.

Why it matters
--------------
Every call splits the graph in two. Around a small kernel that costs more than the kernel; around a large library
module it may not matter.

Example
-------
::

    @torch.compiler.disable
    def white_balance(image):
        return my_kernels.scale(image, 1.08)

    @torch.compile
    def correct(image):
        return white_balance(image.clamp(min=0)).sigmoid()   # OG106

Mended
------
::

    @torch.library.custom_op("cam::white_balance", mutates_args=())
    def white_balance(image: torch.Tensor) -> torch.Tensor:
        return my_kernels.scale(image, 1.08)
    # with a fake: one graph

Remedies
--------
``compile-around``
    Compile the parts between the disabled calls by themselves, or only what lies outside. Price: nothing fuses across.
``register-op``
    Where the disabled function wraps a kernel: make it an op (torch >= 2.11) and take the decorator away.
``leave-it``
    Where the library has a reason, or the break is cheap.
"""

from __future__ import annotations

from opgraft.diagnostics.diagnose import attribute
from opgraft.diagnostics.diagnose.incident import Incident, Verdict
from opgraft.diagnostics.diagnose.remedies import leave_it, register_op
from opgraft.diagnostics.model import Remedy

KIND = "disabled"
_TYPES = (
    "Skip calling `torch.compiler.disable()`d function",
    "Skip inlining `torch.compiler.disable()`d function",
    "Call to `torch.compiler.disable()`",
    "Call to `torch._dynamo.disable()`",
    "Call to `torch._dynamo.skip_frame()`",
    "Forced graph break on leaf function",
)
_INLINE = "Attempted to inline function marked as skipped"


def match(incident: Incident) -> Verdict | None:
    """An incident at the call of a disabled function, or of one in a skipped file that is neither torch nor
    Python's."""
    called = incident.called
    deliberate = incident.gb_type.startswith(_TYPES)
    skipped = incident.gb_type.startswith(_INLINE) and called is not None and not called.native
    if skipped and called is not None:
        skipped = not attribute.is_standard(called) and called.module.partition(".")[0] not in ("torch", "numpy")
    if not deliberate and not skipped:
        return None
    who = attribute.callee(incident)
    name = who.name if who is not None and who.name else "the function called here"
    why = "is kept away from the compiler (torch.compiler.disable)" if deliberate else "lies in a file that torch skips"
    return Verdict(
        kind=KIND,
        message=f"{name} {why}: every call of it ends the graph. The break is a decision, not a failure to trace.",
        location=incident.location,
        key=(KIND, name if who is not None else "", called.file if called is not None else incident.location.path),
        severity="error" if incident.form == "failure" else "warning",
        callee=who,
        remedies=(
            Remedy(
                id="compile-around",
                text="compile the parts before and after by themselves, or compile only what lies inside or outside",
                price="nothing fuses across the call",
            ),
            register_op(incident, f"{name}, if it wraps a kernel,"),
            leave_it("keep it where the library has a reason and the break is cheap"),
        ),
    )
