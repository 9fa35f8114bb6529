"""Very long runs: memory grows with causes, not with events."""

from __future__ import annotations

import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from opgraft.diagnostics.collect import events as ev
from opgraft.diagnostics.diagnose.report import diagnose
from opgraft.diagnostics.model import Location


def many(breaks: int, lines: int) -> Iterator[ev.Event]:
    """A stream of ``breaks`` breaks on ``lines`` source lines, each with a deep stack."""
    yield ev.Began(torch="2.13.0", opgraft="0", prefixes=())
    for number in range(breaks):
        line = 1 + number % lines
        stack = tuple(
            Location(path="/model.py", line=i, function="f", text="x" * 80) for i in (*range(1000, 1020), line)
        )
        identity = f"{number}/0"
        yield ev.CompileBegan(id=identity, stack=stack)
        yield ev.Message(id=identity, number=number, gb_type="Call to `torch._dynamo.graph_break()`", stack=stack)
        yield ev.Broke(id=identity, location=stack[-1], messages=(number,), stack=stack)
        yield ev.Graph(id=identity, ops=3)
        yield ev.CompileEnded(id=identity, function="f", path="/model.py", line=1, ops=3, forward=True)


def test_ten_thousand_breaks_are_one_finding_a_line() -> None:
    report = diagnose(many(10_000, 7))
    assert len(report.findings) == 7
    assert sum(found.counts.compiles for found in report.findings) == 10_000


def test_a_hundred_thousand_events_take_under_200_mb(tmp_path: Path) -> None:
    path = tmp_path / "long.jsonl"
    ev.write_events(path, many(20_000, 40))
    program = (
        "import resource, sys; from pathlib import Path\n"
        "from opgraft.diagnostics.collect.events import read_events\n"
        "from opgraft.diagnostics.diagnose.report import diagnose\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "report = diagnose(read_events(Path(sys.argv[1])))\n"
        "assert sum(f.counts.compiles for f in report.findings) == 20_000\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(path)], check=True, capture_output=True, timeout=300)
    assert int(done.stdout) < 200 * 1024  # kibibytes on Linux


def test_a_watch_keeps_a_bounded_number_of_events() -> None:
    from opgraft.diagnostics.collect import watch

    watched = watch.Watch()
    for event in many(3, 1):
        watched._keep(event)
    assert len(watched.events()) == 16
    assert watch.MOST_EVENTS <= 200_000
    assert resource.RUSAGE_SELF == 0
