"""A stream of events -> incidents and facts, one pass, in memory that grows with causes and graphs, not with events."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from opgraft.diagnostics.collect import events as ev
from opgraft.diagnostics.collect.place import frames_of, function_name
from opgraft.diagnostics.diagnose.incident import Incident
from opgraft.diagnostics.model import Location

_MESSAGES_KEPT = 512
BEFORE = "?"
"""Ids of what was compiled before the watch began start so."""


@dataclass
class CompiledFrame:
    """What is known of one compile id. ``uses`` are the calls of custom and higher-order operators in its graph."""

    id: str
    stack: tuple[Location, ...] = ()
    function: str = ""
    path: str = ""
    line: int = 0
    graphs: int = 0
    ops: int = 0
    location: Location | None = None
    broke: bool = False
    skipped: bool = False
    failed: bool = False
    empty: bool = False
    eager_inputs: int = 0
    output_bytes: int | None = None
    uses: tuple[ev.OpUse, ...] = ()
    order: int = 0


@dataclass(frozen=True)
class Hit:
    """A cache answered for a graph that calls ``op``."""

    op: str
    cache: str
    key: str
    t: float
    location: Location | None


@dataclass
class Story:
    """Everything that the rules need, gathered by :func:`read`."""

    began: ev.Began = field(default_factory=ev.Began)
    ended: ev.Ended | None = None
    raised: ev.Raised | None = None
    laps: ev.Laps = field(default_factory=ev.Laps)
    frames: dict[str, CompiledFrame] = field(default_factory=OrderedDict)
    recompiles: list[ev.Recompiled] = field(default_factory=list)
    ends: dict[str, ev.CompileEnded] = field(default_factory=dict)
    symbols: list[ev.Symbol] = field(default_factory=list)
    cudagraphs: list[ev.CudagraphsSkipped] = field(default_factory=list)
    registered: list[ev.Registered] = field(default_factory=list)
    hits: list[Hit] = field(default_factory=list)
    bypasses: list[ev.Cached] = field(default_factory=list)
    op_uses: dict[str, list[tuple[str, Location | None]]] = field(default_factory=dict)
    graphs: int = 0
    events: int = 0
    generations: int = 0
    limits: set[str] = field(default_factory=set)
    inlined: set[tuple[str, str]] = field(default_factory=set)

    @property
    def prefixes(self) -> tuple[str, ...]:
        return self.began.prefixes

    @property
    def custom_ops(self) -> frozenset[str]:
        """Qualified names of the ops outside torch that the run registered or met in graphs."""
        return frozenset(self.op_uses) | {event.op.partition(".")[0] for event in self.registered}


class Reader:
    """One pass over the events; :meth:`incidents` yields incidents as they are complete."""

    def __init__(self) -> None:
        self.story = Story()
        self._messages: OrderedDict[int, ev.Message] = OrderedDict()
        self._pending: list[Incident] = []
        self._before: list[Incident] = []

    def incidents(self, stream: Iterable[ev.Event]) -> Iterator[Incident]:
        """Reads the whole stream. An incident comes out one step late: the graph after a gap says what the gap gave."""
        for event in stream:
            self.story.events += 1
            yield from self._read(event)
        yield from self._flush()
        yield from self._settle_before()

    def _read(self, event: ev.Event) -> Iterator[Incident]:
        story = self.story
        if isinstance(event, ev.Message):
            self._messages[event.number] = event
            if event.gb_type.startswith(ev.RECOMPILE_LIMIT):
                story.limits.add(event.id.partition("/")[0])
            if len(self._messages) > _MESSAGES_KEPT:
                self._messages.popitem(last=False)
        elif isinstance(event, ev.CompileBegan):
            if any(incident.id != event.id for incident in self._pending):
                yield from self._flush()
            if event.attempt == 0:
                self._new_generation(event.id)
            frame = self._frame(event.id)
            frame.stack = event.stack or frame.stack
        elif isinstance(event, ev.Broke) and event.id.startswith(BEFORE):
            self._before.append(self._broke(event))
        elif isinstance(event, ev.Broke):
            broke = self._broke(event)
            self._pending = [i for i in self._pending if not (i.form == "failure" and i.id == broke.id)]
            yield from self._flush()
            self._pending.append(broke)
        elif isinstance(event, ev.Failed):
            failed = self._failed(event)
            if not any(i.form == "skip" and i.id == failed.id for i in self._pending):
                yield from self._flush()
                self._pending.append(failed)
        elif isinstance(event, ev.Graph):
            self._graph(event)
        elif isinstance(event, ev.CompileEnded):
            self._ended(event)
        elif isinstance(event, ev.Recompiled):
            if len(story.recompiles) < 10_000:
                story.recompiles.append(event)
        elif isinstance(event, ev.Symbol):
            if len(story.symbols) < 10_000:
                story.symbols.append(event)
        elif isinstance(event, ev.CudagraphsSkipped):
            story.cudagraphs.append(event)
        elif isinstance(event, ev.Registered):
            story.registered.append(event)
        elif isinstance(event, ev.Cached):
            self._cached(event)
        elif isinstance(event, ev.Raised):
            story.raised = event
            self._pending = [self._placed(incident, event) for incident in self._pending]
        elif isinstance(event, ev.Laps):
            story.laps = event
        elif isinstance(event, ev.Ended):
            story.ended = event
        elif isinstance(event, ev.Began):
            story.began = event

    def _frame(self, identity: str) -> CompiledFrame:
        frames = self.story.frames
        if identity not in frames:
            frames[identity] = CompiledFrame(identity, order=len(frames))
        return frames[identity]

    def _new_generation(self, identity: str) -> None:
        """``torch._dynamo.reset()`` starts the ids anew: what was known under the same id moves aside."""
        story = self.story
        frame = story.frames.get(identity)
        if frame is not None and identity in story.ends:
            story.generations += 1
            story.frames[f"{identity}~{story.generations}"] = story.frames.pop(identity)
            story.ends[f"{identity}~{story.generations}"] = story.ends.pop(identity)

    def _take(self, numbers: tuple[int, ...]) -> tuple[ev.Message, ...]:
        return tuple(self._messages[number] for number in numbers if number in self._messages)

    def _broke(self, event: ev.Broke) -> Incident:
        frame = self._frame(event.id)
        frame.broke = True
        frame.skipped = frame.skipped or event.skipped
        for message in self._take(event.messages):
            self.story.inlined.update((f.path, f.function) for f in message.stack[1:])
        return Incident(
            form="skip" if event.skipped else "break",
            id=event.id,
            messages=self._take(event.messages),
            outer=frame.stack,
            fallback=event.stack or (event.location,),
            reason=event.reason,
            prefixes=self.story.prefixes,
        )

    def _failed(self, event: ev.Failed) -> Incident:
        frame = self._frame(event.id)
        frame.failed = True
        return Incident(
            form="failure",
            id=event.id,
            messages=self._take(event.messages),
            outer=frame.stack,
            fallback=event.stack,
            error=f"{event.type}: {event.text}",
            prefixes=self.story.prefixes,
        )

    def _placed(self, incident: Incident, raised: ev.Raised) -> Incident:
        """A failure of which nothing but the frame is known, with the user's line that the error's text names."""
        frame = self.story.frames.get(incident.id)
        own = frame.stack[-1] if frame is not None and frame.stack else None
        told = frames_of(raised.text.partition("from user code:")[2])
        if incident.form != "failure" or incident.messages or not told or own is None:
            return incident
        if any((place.path, place.line) != (own.path, own.line) for place in incident.fallback):
            return incident
        return replace(incident, fallback=told)

    def _graph(self, event: ev.Graph) -> None:
        frame = self._frame(event.id)
        self.story.graphs += 1
        frame.graphs += 1
        frame.ops += event.ops
        frame.location = frame.location or event.location
        frame.eager_inputs = event.eager_inputs
        frame.output_bytes = event.output_bytes
        frame.uses = (*event.custom_ops[:256], *event.higher_order[:256])
        for use in event.custom_ops:
            uses = self.story.op_uses.setdefault(use.op.partition(".")[0], [])
            if len(uses) < 256:
                uses.append((event.id, use.location))

    def _ended(self, event: ev.CompileEnded) -> None:
        frame = self._frame(event.id)
        if event.forward is not False and event.function:
            frame.function, frame.path, frame.line = event.function, event.path, event.line
            frame.empty = event.ops == 0
            self.story.ends[event.id] = event

    def _cached(self, event: ev.Cached) -> None:
        if event.outcome == "bypass" and len(self.story.bypasses) < 1000:
            self.story.bypasses.append(event)
        if event.outcome != "hit" or len(self.story.hits) > 10_000:
            return
        for op, uses in self.story.op_uses.items():
            for identity, place in uses:
                if identity == event.id:
                    self.story.hits.append(Hit(op, event.cache, event.key, event.t, place))
                    break

    def _settle_before(self) -> Iterator[Incident]:
        """Of what was compiled before the watch, keeps what ran in it: its graph was called, another part of its
        function was, its code was entered, or a break that is kept lies in it."""
        story = self.story
        ran = set(story.laps.calls)
        functions = {
            (f.path, function_name(f.function)) for i, f in story.frames.items() if i in ran and i.startswith(BEFORE)
        }
        entered = set(story.laps.entered)
        kept = set()
        for _ in range(2):
            for incident in self._before:
                frame = story.frames[incident.id]
                own = (frame.path, function_name(frame.function))
                unseen = frame.graphs == 0 and (own in functions or f"{frame.path}:{frame.line}" in entered)
                if incident.id in ran or unseen:
                    kept.add(incident.id)
                    functions.update((place.path, place.function) for place in incident.stack)
        yield from (incident for incident in self._before if incident.id in kept)
        for identity in [i for i in story.frames if i.startswith(BEFORE) and i not in ran | kept]:
            story.graphs -= story.frames.pop(identity).graphs
            story.ends.pop(identity, None)
        story.recompiles = [e for e in story.recompiles if not e.id.startswith(BEFORE) or e.id in story.frames]

    def _flush(self) -> Iterator[Incident]:
        yield from self._pending
        self._pending.clear()
