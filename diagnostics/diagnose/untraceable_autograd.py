"""OG107 untraceable-autograd: an ``autograd.Function`` that the compiler cannot trace.

What it is
----------
A statement in the forward or the backward of a ``torch.autograd.Function`` that cannot be traced: a raw kernel, a
print, a pointer, strides of the incoming gradient. torch traces both together, so a bad backward takes the forward
out of the graph too, and torch's own message points at ``.apply``.

Why it matters
--------------
The whole function falls out of the graph, forward and backward. In inference, where no backward is traced, the break
is gone: that is why it is easily missed.

Example
-------
::

    class Gate(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x): ctx.save_for_backward(x); return x.relu()
        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            return my_kernels.gate_grad(grad, x)      # OG107: points here

Mended
------
::

    @torch.library.custom_op("my::gate_grad", mutates_args=())
    def gate_grad(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor: ...
    # called in backward in place of the raw binding; with a fake

Remedies
--------
``register-op``
    Make the kernel in forward or backward an op with a fake (torch >= 2.11).
``hoist-host-code``
    Take prints, checks and queries out of forward and backward.
"""

from __future__ import annotations

from opgraft.diagnostics.collect.place import innermost
from opgraft.diagnostics.diagnose import attribute, opaque_call, side_effect
from opgraft.diagnostics.diagnose.incident import Incident, Verdict, statement
from opgraft.diagnostics.diagnose.remedies import hoist, register_op

KIND = "untraceable-autograd"


def match(incident: Incident) -> Verdict | None:
    """An incident inside the forward or the backward of an ``autograd.Function``, not at the call of ``.apply``."""
    root = incident.root
    if root is None or not root.function_class:
        return None
    inside = innermost(root.stack, incident.prefixes)
    if inside is None or not _within(incident):
        return None
    phase = "backward" if inside.function == "backward" or root.phase == "backward" else "forward"
    kernel = opaque_call.is_opaque(incident)
    who = attribute.callee(incident)
    what = f"calls {who.name}" if who is not None and who.name else "does what cannot be traced"
    effect = side_effect.match(incident) is not None
    remedies = (
        hoist(f"`{statement(inside)}`", "forward and backward may hold tensor operations and ops only"),
        register_op(incident, "what this statement needs"),
    )
    return Verdict(
        kind=KIND,
        message=f"The {phase} of {root.function_class} {what}. torch traces forward and backward together, so the "
        "whole function falls out of the graph, and torch's message points at .apply.",
        location=inside,
        key=(KIND, inside.path, inside.line),
        severity="error" if incident.form == "failure" else "warning",
        callee=who,
        remedies=(remedies[1],) if kernel else remedies[:1] if effect else remedies,
        evidence=("under torch.no_grad() there is no backward to trace, and no break",) if phase == "backward" else (),
    )


def _within(incident: Incident) -> bool:
    """True where the stack has entered the function: its innermost changeable frame is not the one that calls
    ``.apply``."""
    root = incident.root
    assert root is not None
    names = [
        frame.function
        for frame in root.stack
        if frame.function in ("forward", "backward", "setup_context", "vmap", "jvp")
    ]
    inside = innermost(root.stack, incident.prefixes)
    return bool(names) and inside is not None and ".apply(" not in inside.text
