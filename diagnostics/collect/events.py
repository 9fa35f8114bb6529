"""What the hooks yield: plain data that can be saved as JSON lines, loaded again and diagnosed without torch.

A stream is in the order in which things happened. ``id`` is torch's compile id, ``frame/compile`` as in ``3/0`` (""
where torch names none), ``attempt`` counts the restarts of one compile, ``t`` is seconds of a clock that never goes
back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from opgraft.diagnostics.model import Location

STREAM = 1
RECOMPILE_LIMIT = ("Dynamo recompile limit exceeded", "Dynamo cache limit exceeded")


class Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", omit_defaults=True):
    """``process`` is 0 in the process that was watched, else the id of a process that it forked."""

    t: float = 0.0
    id: str = ""
    attempt: int = 0
    rank: int | None = None
    thread: int = 0
    process: int = 0


class Began(Event, frozen=True, kw_only=True, tag="began", omit_defaults=True):
    """The head of a stream. ``missing`` names the hooks that this torch does not have, ``prefixes`` the folders of
    torch and the standard library, which a reader cannot change."""

    stream: int = STREAM
    opgraft: str = ""
    torch: str = ""
    python: str = ""
    device: str = "cpu"
    command: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    prefixes: tuple[str, ...] = ()
    late: bool = False


class CompileBegan(Event, frozen=True, kw_only=True, tag="compile-began", omit_defaults=True):
    """A frame is about to be traced. ``stack`` is the Python stack that led to it, outermost first."""

    stack: tuple[Location, ...] = ()


class Argument(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One argument of a call, as the tracer saw it: ``type`` is ``Tensor``, a Python type's name, or the tracer's
    own."""

    type: str
    dtype: str = ""
    shape: tuple[int | str, ...] = ()
    requires_grad: bool = False
    keyword: str = ""


class Called(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the tracer was calling when it gave up: the object's own names, where it lives and who ships it.

    ``native`` says that it has no Python code of its own. ``file`` is the module's file, or that of the function's
    code."""

    name: str = ""
    module: str = ""
    type: str = ""
    type_module: str = ""
    file: str = ""
    distribution: str = ""
    native: bool = False
    variable: str = ""
    method: str = ""
    arguments: tuple[Argument, ...] = ()
    doc: str = ""


class Message(Event, frozen=True, kw_only=True, tag="message", omit_defaults=True):
    """One message of the tracer, with the user's stack at that moment, outermost first. Not every message ends in a
    break.

    ``instruction`` is the name of the bytecode instruction that was being traced; ``function_class`` is the class of
    the ``autograd.Function`` being traced and ``phase`` its ``forward`` or ``backward``, "" outside. ``inner`` are
    frames that an op ran in Python on fake tensors when it failed, outermost first: its body or its fake. ``raises``
    says that the ``if`` at the innermost frame does nothing but raise."""

    number: int
    gb_type: str
    context: str = ""
    explanation: str = ""
    hints: tuple[str, ...] = ()
    stack: tuple[Location, ...] = ()
    instruction: str = ""
    called: Called | None = None
    phase: str = ""
    function_class: str = ""
    inner: tuple[Location, ...] = ()
    raises: bool = False


class Broke(Event, frozen=True, kw_only=True, tag="broke", omit_defaults=True):
    """A graph break. ``messages`` are the numbers of the messages that led to it, root cause first. ``skipped`` says
    that the whole frame falls back to eager."""

    location: Location
    reason: str = ""
    skipped: bool = False
    messages: tuple[int, ...] = ()
    stack: tuple[Location, ...] = ()


class Failed(Event, frozen=True, kw_only=True, tag="failed", omit_defaults=True):
    """A compile ended in an error. ``messages`` as in :class:`Broke`; ``stack`` is the user's stack, innermost last."""

    type: str = ""
    text: str = ""
    messages: tuple[int, ...] = ()
    stack: tuple[Location, ...] = ()


class OpUse(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A call of an op outside torch's own namespaces in a graph, with the user's line."""

    op: str
    location: Location | None = None


class Graph(Event, frozen=True, kw_only=True, tag="graph", omit_defaults=True):
    """A graph went to the backend. ``eager_inputs`` are its inputs that an eager gap just before it produced;
    ``higher_order`` are its calls of operators that take functions, such as ``autograd_function_apply``."""

    ops: int = 0
    custom_ops: tuple[OpUse, ...] = ()
    higher_order: tuple[OpUse, ...] = ()
    eager_inputs: int = 0
    location: Location | None = None
    output_bytes: int | None = None


class CompileEnded(Event, frozen=True, kw_only=True, tag="compile-ended", omit_defaults=True):
    """One row of torch's compilation metrics. ``line`` is the first line of the frame's code."""

    function: str = ""
    path: str = ""
    line: int = 0
    seconds: float | None = None
    ops: int | None = None
    forward: bool | None = None
    run_time: bool = False
    fail_type: str = ""
    fail_reason: str = ""
    fail_path: str = ""
    fail_line: int | None = None
    restarts: tuple[str, ...] = ()
    recompile_reason: str = ""
    cudagraph_skip: str = ""
    compliant_ops: tuple[str, ...] = ()
    other_ops: tuple[str, ...] = ()


class Recompiled(Event, frozen=True, kw_only=True, tag="recompiled", omit_defaults=True):
    """A frame is compiled again. ``reasons`` are torch's texts, one an older entry of the cache, the newest first.

    ``place`` is where the code of the frame first uses the value whose guard failed, ``function`` the frame's own name.
    """

    reasons: tuple[str, ...] = ()
    place: Location | None = None
    function: str = ""
    path: str = ""


class Symbol(Event, frozen=True, kw_only=True, tag="symbol", omit_defaults=True):
    """A symbolic size became a constant. ``stack`` is where in the user's code, outermost first."""

    symbol: str = ""
    sources: tuple[str, ...] = ()
    value: str = ""
    reason: str = ""
    stack: tuple[Location, ...] = ()


class CudagraphsSkipped(Event, frozen=True, kw_only=True, tag="cudagraphs-skipped", omit_defaults=True):
    """CUDA graphs were skipped or split. ``partitions`` is 0 for a skip."""

    reason: str = ""
    partitions: int = 0
    stack: tuple[Location, ...] = ()


class Cached(Event, frozen=True, kw_only=True, tag="cached", omit_defaults=True):
    """A compile cache answered. ``outcome`` is ``hit``, ``miss`` or ``bypass``."""

    cache: str = ""
    outcome: str = ""
    key: str = ""
    reason: str = ""


class Registered(Event, frozen=True, kw_only=True, tag="registered", omit_defaults=True):
    """An op was defined, or given a kernel or a fake. ``again`` says that the name had been defined before."""

    op: str = ""
    schema: str = ""
    what: str = "define"
    again: bool = False
    location: Location | None = None


class Warned(Event, frozen=True, kw_only=True, tag="warned", omit_defaults=True):
    """A line of torch's own log that a rule reads."""

    logger: str = ""
    text: str = ""
    stack: tuple[Location, ...] = ()


class Raised(Event, frozen=True, kw_only=True, tag="raised", omit_defaults=True):
    """The script ended with this exception; ``stack`` is its traceback, outermost first."""

    type: str = ""
    text: str = ""
    stack: tuple[Location, ...] = ()
    compiling: bool = False


class Laps(Event, frozen=True, kw_only=True, tag="laps", omit_defaults=True):
    """The repeating part of the run: graphs in order, each with the times of every repeat that was kept.

    ``graphs[i]`` is a compile id, ``us[i]`` and ``gap_us[i]`` (the gap after it) hold one number a repeat, in
    microseconds; ``step_us`` whole steps. ``calls`` counts the calls of every graph. ``entered`` holds
    where the code of the compiled callables begins that were entered, as ``path:line``, for a watcher that attached
    late. ``callee_us`` holds, for the gap after a compile id, the own times of what
    was called in it, by name."""

    graphs: tuple[str, ...] = ()
    us: tuple[tuple[float, ...], ...] = ()
    gap_us: tuple[tuple[float, ...], ...] = ()
    callee_us: dict[str, dict[str, tuple[float, ...]]] = {}
    step_us: tuple[float, ...] = ()
    steps: int = 0
    calls: dict[str, int] = {}
    entered: tuple[str, ...] = ()


class Ended(Event, frozen=True, kw_only=True, tag="ended", omit_defaults=True):
    """The watched run ended on its own feet. ``counters`` are torch's own, as differences over the run; ``device`` is
    where it computed in the end: a program rarely uses CUDA before it is watched."""

    exit_code: int = 0
    seconds: float = 0.0
    how: str = "ok"
    detail: str = ""
    counters: dict[str, int] = {}
    compiled_anything: bool = False
    dropped: int = 0
    device: str = ""


AnyEvent = (
    Began
    | CompileBegan
    | Message
    | Broke
    | Failed
    | Graph
    | CompileEnded
    | Recompiled
    | Symbol
    | CudagraphsSkipped
    | Cached
    | Registered
    | Warned
    | Raised
    | Laps
    | Ended
)

_encoder = msgspec.json.Encoder()
_decoder: msgspec.json.Decoder[AnyEvent] = msgspec.json.Decoder(AnyEvent)


def encode(event: Event) -> bytes:
    """One JSON line, newline included."""
    return _encoder.encode(event) + b"\n"


def read_events(path: Path) -> Iterator[AnyEvent]:
    """The events of a saved stream. A line that is cut off (the writer was killed) or of a newer kind is passed
    over."""
    with path.open("rb") as lines:
        for line in lines:
            event = _decoded(line)
            if event is not None:
                yield event


def _decoded(line: bytes) -> AnyEvent | None:
    try:
        return _decoder.decode(line)
    except msgspec.DecodeError:
        return None


def write_events(path: Path, events: Iterable[Event]) -> None:
    """Saves a stream."""
    with path.open("wb") as out:
        for event in events:
            out.write(encode(event))
