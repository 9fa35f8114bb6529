"""Decisions on disk: one readable JSON file an architecture and torch minor version.

Beside the decisions stand answers (see ``answers``), which save a second process time and decide nothing. A file can be
checked in beside a model. It is written by replacement under a lock, so that neither a crash nor two writers leave it
torn; what cannot be read is ignored with one warning and the compiler's code is used.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import platform
import re
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch

from opgraft.compile.site import COMPILER, KERNEL, Decision, SiteWarning

FORMAT = 1
_KIND = "opgraft decisions"
_LOCK_SECONDS = 10.0

Entry = dict[str, Any]


def default_folder() -> Path:
    """``$OPGRAFT_STORE``, or ``opgraft`` in the user's cache folder."""
    if given := os.environ.get("OPGRAFT_STORE"):
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "opgraft"


@cache
def architecture(device: str) -> str:
    """What a measurement holds for: the GPU's name, or the processor's name and the number of threads."""
    if device == "cuda" and torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"{_processor()} x{torch.get_num_threads()}" if device == "cpu" else device


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def torch_minor() -> str:
    return ".".join(torch.__version__.split(".")[:2])


class Store:
    """The decisions of one file a device.

    Args:
        location: a folder, in which each architecture has its file, or one ``.json`` file for all; the default folder
            where left out.
        read_only: decisions are used and none is written.
    """

    def __init__(self, location: str | os.PathLike[str] | None = None, *, read_only: bool = False) -> None:
        self.location = Path(location) if location is not None else default_folder()
        self.read_only = read_only
        self._memory: dict[Path, dict[str, Entry]] = {}
        self._answers: dict[Path, Entry] = {}
        self._seen: dict[Path, tuple[int, int]] = {}
        self._silent = False

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Store) and (self.location, self.read_only) == (other.location, other.read_only)

    def __hash__(self) -> int:
        return hash((self.location, self.read_only))

    def file(self, device: str) -> Path:
        """Where the decisions for a device type are kept."""
        if self.location.suffix == ".json":
            return self.location
        name = re.sub(r"[^A-Za-z0-9.]+", "-", architecture(device)).strip("-").lower()
        return self.location / f"{name}-torch{torch_minor()}.json"

    def find(self, device: str, key: str) -> Decision | None:
        """The decision under a key; None where there is none that can be used."""
        entry = self.entries(self.file(device)).get(key)
        return _decision(entry) if entry is not None else None

    def entries(self, path: Path) -> dict[str, Entry]:
        """Everything known of a file: what is on disk, and what could not be written to it."""
        held = self._memory.setdefault(path, {})
        try:
            status = path.stat()
        except OSError:
            return held
        stamp = (status.st_mtime_ns, status.st_size)
        if self._seen.get(path) != stamp:
            self._seen[path] = stamp
            content, problem = _content(path)
            if problem:
                self._warn(f"opgraft: {path} {problem}; it is ignored")
            else:
                held.update(content["decisions"])
                self._answers[path] = _table(content.get("answers"))
        return held

    def answers(self, device: str, of: str) -> Mapping[str, Any]:
        """The answers kept for a device type under an identity."""
        path = self.file(device)
        self.entries(path)
        table = self._answers.get(path, {})
        return table["known"] if table.get("of") == of else {}

    def keep(self, device: str, of: str, answers: Mapping[str, bool]) -> None:
        """Adds answers; those of another identity are dropped. Where they cannot be written they are asked again."""
        path = self.file(device)
        self._answers[path] = {"of": of, "known": {**self.answers(device, of), **answers}}
        if not self.read_only:
            with contextlib.suppress(OSError):
                merge(path, {}, answers={"of": of, "known": dict(answers)})

    def put(self, device: str, key: str, decision: Decision, about: Mapping[str, Any]) -> None:
        """Keeps a decision: on disk, or for this process alone where the file cannot be written."""
        path = self.file(device)
        entry = {
            **{k: v for k, v in dataclasses.asdict(decision).items() if v is not None and v != "" and v is not False},
            **about,
        }
        self.entries(path)[key] = entry
        if self.read_only:
            return
        try:
            merge(path, {key: entry})
        except OSError as error:
            self._warn(f"opgraft: {path} cannot be written ({error}); decisions are kept for this process alone")

    def digest(self) -> str:
        """Changes with every decision in the store's files."""
        import hashlib

        found = hashlib.sha256()
        for path in self.files():
            for key, entry in sorted(self.entries(path).items()):
                found.update(f"{key}={entry.get('choice')};".encode())
        return found.hexdigest()[:16]

    def files(self) -> list[Path]:
        if self.location.suffix == ".json":
            return [self.location]
        on_disk = self.location.glob(f"*-torch{torch_minor()}.json") if self.location.is_dir() else []
        return sorted({*on_disk, *self._memory})

    def _warn(self, message: str) -> None:
        if not self._silent:
            self._silent = True
            warnings.warn(message, SiteWarning, stacklevel=3)


def _decision(entry: Entry) -> Decision | None:
    try:
        known = {f.name: entry[f.name] for f in dataclasses.fields(Decision) if f.name in entry}
        if "interval" in known:
            low, high = known["interval"]
            known["interval"] = (float(low), float(high))
        decision = Decision(**known)
    except (TypeError, ValueError):
        return None
    return decision if decision.choice in (KERNEL, COMPILER) else None


def read(path: Path) -> tuple[dict[str, Entry], str]:
    """The decisions of a file, and what is wrong with it, if anything (then there are none)."""
    content, problem = _content(path)
    return content.get("decisions", {}), problem


def _content(path: Path) -> tuple[dict[str, Any], str]:
    """A whole file, and what is wrong with it, if anything (then it is empty)."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        return {}, f"cannot be read ({type(error).__name__})"
    if not isinstance(content, dict) or content.get("kind") != _KIND:
        return {}, "is no file of decisions"
    if content.get("format") != FORMAT:
        return {}, f"has format {content.get('format')}, this version reads {FORMAT}"
    if content.get("torch") != torch_minor():
        return {}, f"is for torch {content.get('torch')}, this is {torch_minor()}"
    entries = content.get("decisions")
    if not isinstance(entries, dict) or not all(isinstance(e, dict) for e in entries.values()):
        return {}, "has no table of decisions"
    return content, ""


def _table(found: Any) -> Entry:
    """The table of answers in a file; empty where it is none."""
    return found if isinstance(found, dict) and isinstance(found.get("known"), dict) else {}


def merge(
    path: Path, fresh: Mapping[str, Entry], drop: frozenset[str] = frozenset(), answers: Entry | None = None
) -> None:
    """Adds decisions and answers to a file (and drops some), whoever else writes meanwhile.

    Answers of another identity go, and so do all where decisions are dropped.

    Raises:
        OSError: the file cannot be written, or holds somebody else's JSON, which is never overwritten.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with _locked(path):
        content, problem = _content(path) if path.exists() else ({}, "")
        if problem and not _may_be_replaced(path):
            raise OSError(f"{path.name} {problem} and is not overwritten")
        kept = {k: v for k, v in {**content.get("decisions", {}), **fresh}.items() if k not in drop}
        table = {} if drop else _table(content.get("answers"))
        if answers is not None:
            known = table["known"] if table.get("of") == answers["of"] else {}
            table = {"of": answers["of"], "known": {**known, **answers["known"]}}
        whole = {"kind": _KIND, "format": FORMAT, "torch": torch_minor(), "decisions": dict(sorted(kept.items()))}
        text = json.dumps({**whole, **({"answers": table} if table else {})}, indent=1)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text + "\n")
                file.flush()
                os.fsync(file.fileno())
            os.replace(name, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(name)
            raise


def _may_be_replaced(path: Path) -> bool:
    """True for a torn file and for one of an older format; somebody else's, or another torch's, stays."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return True
    if not isinstance(content, dict) or content.get("kind") != _KIND or content.get("torch") != torch_minor():
        return False
    written = content.get("format")
    return not isinstance(written, int) or written <= FORMAT


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds ``path``'s lock file. The lock goes with the process, so that a crash leaves nothing behind."""
    import fcntl

    deadline = time.monotonic() + _LOCK_SECONDS
    with open(path.with_name(path.name + ".lock"), "w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise OSError(f"{path.name} has been locked by another process for {_LOCK_SECONDS:.0f} s") from None
                time.sleep(0.02)
        yield
