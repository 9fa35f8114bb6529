"""OG108 triton-launch: a Triton kernel is launched in a way that the compiler cannot take.

What it is
----------
A ``@triton.jit`` kernel launched from the compiled region with something the compiler does not model: a grid or an
argument it cannot trace, an unusual decorator, a launcher object of one's own, a pointer instead of a tensor.

Why it matters
--------------
A plain launch ``kernel[grid](...)`` is taken into the graph and needs no op at all. One that is not taken splits the
graph as a raw kernel does.

Example
-------
::

    launcher = my_cache.get(kernel, config)
    launcher.run(x, y, n)                    # OG108

Mended
------
::

    @torch.library.triton_op("my::add", mutates_args={})
    def add(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        wrap_triton(kernel)[(triton.cdiv(x.numel(), 1024),)](x, y, out, x.numel(), BLOCK=1024)
        return out

Remedies
--------
``use-triton-op``
    ``torch.library.triton_op`` with ``wrap_triton`` around the kernel (torch >= 2.11), or a direct
    ``kernel[grid](...)`` with tensors, numbers and a tuple or lambda for the grid. Price: none; the kernel stays
    visible to the compiler.
"""

from __future__ import annotations

import re

from opgraft.diagnostics.diagnose import attribute
from opgraft.diagnostics.diagnose.incident import Incident, Verdict
from opgraft.diagnostics.model import Callee, Remedy

KIND = "triton-launch"
_WORDS = re.compile(r"\btriton\b|wrap_triton|triton_kernel", re.IGNORECASE)


def match(incident: Incident) -> Verdict | None:
    """An incident at the launch of a Triton kernel."""
    called = incident.called
    triton = called is not None and attribute.is_triton(called)
    if not triton and not (incident.root is not None and _WORDS.search(incident.gb_type + incident.root.context)):
        return None
    who = attribute.callee(incident) or Callee(name="a Triton kernel", owner="triton")
    return Verdict(
        kind=KIND,
        message=f"The launch of {who.name} cannot be taken into the graph: {incident.gb_type}.",
        location=incident.location,
        key=(KIND, incident.location.path, incident.location.line),
        severity="error" if incident.form == "failure" else "warning",
        callee=who,
        remedies=(
            Remedy(
                id="use-triton-op",
                text="launch it as kernel[grid](...) with tensors and numbers, or wrap the launch with "
                "torch.library.triton_op and wrap_triton",
                price="none; the kernel stays visible to the compiler",
            ),
        ),
    )
