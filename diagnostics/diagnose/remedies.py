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
    """torch's own advice, shortened to its first sentences."""
    useful = [hint for hint in hints if "report an issue" not in hint.lower() and "file an issue" not in hint.lower()]
    text = " ".join((useful or list(hints) or ["torch gives no advice for this"])[0].split())
    return Remedy(id="torch-hint", text=f"torch's own advice: {text[:400]}")


KEEP_ON_DEVICE = Remedy(
    id="keep-on-device",
    text="keep the value a tensor: use it in tensor arithmetic, torch.where or an op that takes a tensor",
    price="none; on a GPU it also removes a wait for the device",
)
