"""What rules look at: one break or failed compile, with everything that the hooks said about it, in one record."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from opgraft.diagnostics.collect.events import Argument, Called, Message
from opgraft.diagnostics.collect.place import changeable, innermost
from opgraft.diagnostics.model import Callee, Cause, Location, Remedy, Severity


@dataclass(frozen=True)
class Incident:
    """A graph break (``break``), a frame that falls back to eager whole (``skip``) or a compile that fails
    (``failure``).

    ``messages`` are the tracer's, root cause first. ``outer`` is the Python stack that led to the compile, outermost
    first; ``fallback`` the place that torch itself names. ``gives_tensor`` says whether the value that came out of the
    eager gap is a tensor, None where nobody saw it.
    """

    form: Literal["break", "skip", "failure"]
    id: str
    messages: tuple[Message, ...] = ()
    outer: tuple[Location, ...] = ()
    fallback: tuple[Location, ...] = ()
    reason: str = ""
    error: str = ""
    prefixes: tuple[str, ...] = ()
    gives_tensor: bool | None = None
    custom_ops: frozenset[str] = frozenset()

    @property
    def root(self) -> Message | None:
        """The root cause: the first message, or the first that is not a wrapper."""
        return next(
            (m for m in self.messages if not is_wrapper(m.gb_type)), self.messages[0] if self.messages else None
        )

    @property
    def stack(self) -> tuple[Location, ...]:
        """The user's stack inside the compiled region, outermost first."""
        return self.root.stack if self.root is not None and self.root.stack else self.fallback

    @property
    def location(self) -> Location:
        """The innermost frame that the reader can change; of torch's own place, if all else is missing."""
        found = innermost(self.stack, self.prefixes) or innermost(self.fallback, self.prefixes)
        found = found or innermost(self.outer, self.prefixes)
        if found is not None:
            return found
        return self.stack[-1] if self.stack else Location(path="", line=0)

    @property
    def deepest(self) -> Location:
        """Like :attr:`location`, but inside the Python body of an op where that is what failed on fake tensors."""
        inner = self.root.inner if self.root is not None else ()
        return innermost(inner, self.prefixes) or self.location

    @property
    def reader_stack(self) -> tuple[Location, ...]:
        """The frames that the reader can change, outermost first, from the script down to the break."""
        frames = [frame for frame in (*self.outer, *self.stack) if changeable(frame.path, self.prefixes)]
        kept: list[Location] = []
        for frame in frames:
            if kept and (kept[-1].path, kept[-1].function) == (frame.path, frame.function):
                kept[-1] = frame
            else:
                kept.append(frame)
        return tuple(kept)

    @property
    def called(self) -> Called | None:
        return self.root.called if self.root is not None else None

    @property
    def gb_type(self) -> str:
        return self.root.gb_type if self.root is not None else ""

    @property
    def text(self) -> str:
        """All that torch said about the root cause, for rules that must read words."""
        root = self.root
        if root is None:
            return f"{self.reason}\n{self.error}"
        return "\n".join((root.gb_type, root.context, root.explanation, *root.hints, self.error))

    @property
    def takes_tensor(self) -> bool:
        return any(argument.type in ("Tensor", "Tensor[]") for argument in self.arguments)

    @property
    def arguments(self) -> tuple[Argument, ...]:
        return self.called.arguments if self.called is not None else ()

    @property
    def causes(self) -> tuple[Cause, ...]:
        """The messages as the report shows them, root first, repeated ones once."""
        causes = (
            Cause(gb_type=m.gb_type, context=m.context, explanation=m.explanation, hints=m.hints) for m in self.messages
        )
        return tuple(dict.fromkeys(causes))


@dataclass(frozen=True)
class Verdict:
    """What a rule says of an incident. Incidents with the same ``key`` are one finding."""

    kind: str
    message: str
    location: Location
    key: tuple[object, ...]
    severity: Severity = "warning"
    callee: Callee | None = None
    remedies: tuple[Remedy, ...] = ()
    evidence: tuple[str, ...] = ()


_WRAPPERS = (
    "Graph break in loop",
    "Graph break under",
    "Graph break in inlined function",
    "Failed to handle graph break gracefully",
)


def is_wrapper(gb_type: str) -> bool:
    """True for messages that only say where a break could not be resumed from."""
    lowered = gb_type.lower()
    return lowered.startswith(tuple(word.lower() for word in _WRAPPERS)) or "cannot resume" in lowered


def statement(place: Location) -> str:
    """The part of the line that the place marks, short enough for a sentence."""
    text = place.text
    if place.column is not None:
        one_line = place.end_line in (None, place.line)
        text = text[place.column : place.end_column if one_line else None]
    text = text.partition("  #")[0].strip() or place.text.strip()
    return text if len(text) <= 80 else text[:79] + "…"
