"""torch's texts of failed guards -> what changed: a size with its old and new value, a number, a text, or other
state."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass

_SIZE = re.compile(
    r"tensor '(?P<name>.+?)' (?:size|stride) mismatch at index (?P<index>\d+)\. "
    r"expected (?P<old>-?\d+), actual (?P<new>-?\d+)"
)
_VALUE = re.compile(r"^(?P<name>[A-Za-z_][\w.\[\]'\"]*) == (?P<value>\S.*)$")
_STATES = (
    "dtype",
    "requires_grad",
    "dispatch key",
    "device",
    "rank mismatch",
    "grad_mode",
    "Global state",
    "training",
)
_KEYWORD = re.compile(r"^kwargs\['(\w+)'\]")
_LOCAL = re.compile(r"^[LG]\['(\w+)'\]")


@dataclass(frozen=True)
class Change:
    """What a guard saw change. ``category`` is ``size``, ``number``, ``text``, a word of torch's state, or the guard's
    own words without numbers; ``name`` is the value as its source spells it, "" where torch made it up."""

    category: str
    name: str = ""
    index: int = 0
    old: str = ""
    new: str = ""

    @property
    def subject(self) -> str:
        return f"{self.name}.size({self.index})" if self.category == "size" and self.name else self.name


def change(reason: str) -> Change:
    """The change behind one reason of torch's."""
    text = _body(reason)
    size = _SIZE.search(text)
    if size:
        return Change("size", source_name(size["name"]), int(size["index"]), size["old"], size["new"])
    words = guard_words(reason)
    value = _VALUE.match(words)
    if value:
        kind = _kind_of(value["value"])
        if kind:
            return Change(kind, source_name(value["name"]), old=value["value"])
    for word in _STATES:
        if word.lower() in words.lower():
            return Change(word)
    return Change(re.sub(r"\d+(\.\d+)?", "#", words)[:120])


def size_source(reason: str) -> tuple[str, str] | None:
    """Name and dimension of the tensor in a size guard, as torch spells them; None for other guards."""
    found = _SIZE.search(_body(reason))
    return (found["name"], found["index"]) if found else None


def guard_words(reason: str) -> str:
    """The guard itself: torch's text without the entry's number, the source comment and the stack."""
    text = _body(reason)
    return " ".join(text.partition("User stack trace")[0].partition("  #")[0].partition(" # ")[0].split())[:200]


def source_name(name: str) -> str:
    """``input_ids`` from ``kwargs['input_ids']``; "" for a value on the stack that has no name in the source."""
    name = _LOCAL.sub(r"\1", _KEYWORD.sub(r"\1", name))
    return "" if name.startswith("___") else name


def _body(reason: str) -> str:
    head, colon, rest = reason.partition(": ")
    return rest if colon and re.fullmatch(r"\S+/\d+", head.strip()) else reason


def _kind_of(text: str) -> str:
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return ""
    if isinstance(value, bool):
        return "flag"
    return "number" if isinstance(value, (int, float)) else "text" if isinstance(value, str) else ""
