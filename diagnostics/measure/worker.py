"""One process of a comparison: ``python -m opgraft.diagnostics.measure.worker REQUEST RESULT PROGRESS``.

It reads a Request, writes a Reading or FactsReading, and appends a line of progress before each stage, so that the
parent knows what ran when a process ends without a word.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import msgspec

from opgraft.diagnostics.measure import collect, environment, session
from opgraft.diagnostics.measure.request import Request, question_for, subject_for
from opgraft.diagnostics.orphans import end_with


class Refused(msgspec.Struct, frozen=True, kw_only=True):
    """The request cannot be carried out as it stands: a wrong name, no such op, nothing to compare."""

    refused: str


def main(arguments: list[str]) -> int:
    end_with(0)
    request_file, result_file, progress_file = (Path(a) for a in arguments)
    request: Request = msgspec.json.decode(request_file.read_bytes(), type=Request)

    def tell(message: str, share: float) -> None:
        with progress_file.open("a") as out:
            out.write(f"{share:.3f} {message}\n")

    tell("building the model", 0.0)
    try:
        subject = subject_for(request)
        tell("looking for the ops", 0.02)
        question = question_for(request, subject)
    except (LookupError, TypeError, FileNotFoundError) as error:
        _write(result_file, msgspec.json.encode(Refused(refused=str(error))))
        return 2
    with environment.pinned(subject.device):
        if request.task == "facts":
            result = msgspec.json.encode(collect.collect(subject, question, tell))
        else:
            result = msgspec.json.encode(session.run(subject, question, tell))
    _write(result_file, result)
    return 0


def _write(path: Path, content: bytes) -> None:
    """In one step, so that a result is there whole or not at all."""
    new = path.with_suffix(".new")
    new.write_bytes(content)
    os.replace(new, path)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
