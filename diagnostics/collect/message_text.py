"""torch's formatted message -> its four fields again, where only the text is left: a break that was met before the
watch, or a torch whose formatting function cannot be listened to."""

from __future__ import annotations

import re
from typing import Any

from opgraft.diagnostics.collect.events import Message
from opgraft.diagnostics.model import Location

_BLOCK = re.compile(
    r"^(?P<type>\S[^\n]*)\n  Explanation: (?P<explanation>.*?)\n(?P<hints>(?:  Hint: .*?\n)*?)\n?"
    r"  Developer debug context: (?P<context>.*?)(?:\n\n|\Z)",
    re.MULTILINE | re.DOTALL,
)
_HINT = re.compile(r"  Hint: (.*?)(?=\n  Hint: |\Z)", re.DOTALL)
_JUMP = "generic_jump"


def parse_messages(text: str, stack: tuple[Location, ...], number: int, common: dict[str, Any]) -> list[Message]:
    """The messages that ``text`` holds, in its order; a jump on a tensor's value has no such form and is told by its
    one word. ``number`` is given to the first, the next ones get the numbers below it."""
    found: list[Message] = []
    for block in list(_BLOCK.finditer(text))[:8]:
        found.append(
            Message(
                number=number - len(found),
                gb_type=block["type"].strip(),
                context=block["context"].strip()[:2000],
                explanation=" ".join(block["explanation"].split())[:2000],
                hints=tuple(" ".join(hint.split())[:1000] for hint in _HINT.findall(block["hints"].rstrip("\n"))),
                stack=stack,
                **common,
            )
        )
    if not found and text.startswith(_JUMP):
        context = text.partition(_JUMP)[2].strip()[:2000]
        found.append(
            Message(
                number=number,
                gb_type="Data-dependent branching",
                context=f"attempted to jump with {context}",
                stack=stack,
                **common,
            )
        )
    return found
