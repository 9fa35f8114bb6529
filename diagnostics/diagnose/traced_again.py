"""A compiled function that is traced a second time: torch refuses to, and the program ends.

The finding is of kind ``other-break``: no kernel takes part, whatever the error's text says of FX or of data pointers.
"""

from __future__ import annotations

from opgraft.diagnostics.collect.place import innermost
from opgraft.diagnostics.diagnose.story import Story
from opgraft.diagnostics.kinds import KINDS
from opgraft.diagnostics.model import Cause, Finding, Location, Remedy

KIND = "other-break"
_ENTRY = "/torch/_dynamo/eval_frame.py"
"""Where a call of compiled code begins: an error of torch's own that is raised right here refuses the call."""
_RUNTIME = "/torch/_inductor/"
"""Where compiled code is run: it asks its inputs for memory, which a tracer's stand-ins have none of."""
_NO_MEMORY = ("FakeTensor", "FunctionalTensor", "data pointer", "doesn't have storage")
_TRACERS = {
    "/torch/fx/experimental/proxy_tensor.py": "make_fx",
    "/torch/fx/_symbolic_trace.py": "torch.fx",
    "/torch/jit/_trace.py": "torch.jit.trace",
    "/torch/export/": "torch.export",
}


def conclude(story: Story, found: list[Finding]) -> list[Finding]:
    """The finding, where the program ended so and nothing that was found before explains it."""
    raised = story.raised
    if raised is None or raised.compiling or not raised.stack or any(one.severity == "error" for one in found):
        return []
    end = raised.stack[-1].path
    refused = end.endswith(_ENTRY) and raised.type == "builtins.RuntimeError"
    running = any(_RUNTIME in frame.path for frame in raised.stack[-3:])
    without = running and any(word in raised.text for word in _NO_MEMORY)
    at = innermost(raised.stack, story.prefixes)
    if at is None or not (refused or without):
        return []
    by = tracer(raised.stack)
    lines = raised.text.strip().splitlines()
    return [
        Finding(
            kind=KIND,
            code=KINDS[KIND].code,
            severity="error",
            message=f"What is called here is compiled already, and {by or 'a tracer'} traces it again, which torch "
            "does not support. No kernel is at fault.",
            location=at,
            sites=(at,),
            stack=(at,),
            causes=(Cause(gb_type=raised.type, context="", explanation=lines[0] if lines else "", hints=()),),
            remedies=(
                Remedy(
                    id="torch-hint",
                    text=f"give {by or 'the tracer'} the function or module as it was before torch.compile (a compiled "
                    "module keeps it as `_orig_mod`), and compile what comes out",
                    price="none",
                ),
            ),
        )
    ]


def tracer(stack: tuple[Location, ...]) -> str:
    """The name of the outermost tracer in this stack, which is the one that was called; "" where there is none."""
    for frame in stack:
        for path, name in _TRACERS.items():
            if path in frame.path:
                return name
    return ""
