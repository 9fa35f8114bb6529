"""Texts of remedies that several rules give. Each is specific to the incident: the schema, the statement, the
argument."""

from __future__ import annotations

from opgraft.diagnostics.diagnose import attribute
from opgraft.diagnostics.diagnose.incident import Incident
from opgraft.diagnostics.model import Remedy


def register_op(incident: Incident, what: str = "") -> Remedy:
    """``register-op`` with the schema that the call suggests."""
    called = incident.called
    arguments = incident.arguments
    if called is None or attribute.is_foreign(called) or not incident.takes_tensor:
        subject = what or "this call"
        text = (
            f"put {subject} inside an op: a function around it that takes and gives tensors, registered with "
            "torch.library.custom_op, with a fake that gives the output's shape, dtype and strides"
        )
    else:
        text = (
            f"register it: {attribute.schema(called, arguments, incident.gives_tensor)}, "
            "with a fake that gives the output's shape, dtype and strides"
        )
    if any(argument.requires_grad for argument in arguments):
        text += "; an input requires a gradient, so it needs an autograd formula too (the raw call loses the gradient)"
    return Remedy(id="register-op", text=text, price="one registration; some microseconds a call for the dispatcher")


def hoist(statement: str, why: str) -> Remedy:
    """``hoist-host-code`` for one statement."""
    return Remedy(
        id="hoist-host-code",
        text=f"move {statement} out of the compiled region: {why}",
        price="the value is fixed when the model is built or loaded",
    )


def leave_it(why: str) -> Remedy:
    return Remedy(id="leave-it", text=why, price="none")


def torch_hint(hints: tuple[str, ...]) -> Remedy:
    """torch's own advice, shortened to its first sentences; where all it says is to report an issue, that."""
    useful = [hint for hint in hints if not _is_report(hint)]
    if useful:
        return Remedy(id="torch-hint", text=f"torch's own advice: {' '.join(useful[0].split())[:400]}")
    if hints:
        return Remedy(id="torch-hint", text="torch gives no advice but to report it as an issue of torch's")
    return Remedy(id="torch-hint", text="torch gives no advice for this")


def is_advice(hints: tuple[str, ...]) -> bool:
    """True where torch says more than that an issue may be filed."""
    return any(not _is_report(hint) for hint in hints)


def _is_report(hint: str) -> bool:
    lowered = hint.lower()
    return "report an issue" in lowered or "file an issue" in lowered


KEEP_ON_DEVICE = Remedy(
    id="keep-on-device",
    text="keep the value a tensor: use it in tensor arithmetic, torch.where or an op that takes a tensor",
    price="none; on a GPU it also removes a wait for the device",
)
