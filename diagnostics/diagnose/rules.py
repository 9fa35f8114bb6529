"""The rules in the order in which they are asked: the first that knows an incident has it."""

from __future__ import annotations

from collections.abc import Callable

from opgraft.diagnostics.diagnose import (
    data_branch,
    data_dependent_shape,
    disabled,
    host_code,
    host_read,
    missing_fake,
    opaque_call,
    other_break,
    side_effect,
    triton_launch,
    untraceable_autograd,
)
from opgraft.diagnostics.diagnose.incident import Incident, Verdict

RULES: tuple[Callable[[Incident], Verdict | None], ...] = (
    untraceable_autograd.match,
    missing_fake.match,
    host_read.match,
    data_dependent_shape.match,
    data_branch.match,
    side_effect.match,
    disabled.match,
    triton_launch.match,
    opaque_call.match,
    host_code.match,
    other_break.match,
)


def judge(incident: Incident) -> Verdict:
    """What the first rule says that knows the incident; the last rule knows all."""
    for rule in RULES:
        verdict = rule(incident)
        if verdict is not None:
            return verdict
    raise AssertionError("the last rule takes every incident")
