"""The table of ``opgraft explain --sites``: every place where an op could serve, chosen or not, and why."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

VARIABLE = "OPGRAFT_SITES_FILE"


@contextmanager
def listed(wanted: bool) -> Iterator[Callable[[], None]]:
    """While this is open, programs that are explained list their sites; what it yields prints them."""
    if not wanted:
        yield lambda: None
        return
    with tempfile.TemporaryDirectory(prefix="opgraft-") as folder:
        path = Path(folder) / "sites.jsonl"
        before = os.environ.get(VARIABLE)
        os.environ[VARIABLE] = str(path)
        try:
            yield lambda: _show(path)
        finally:
            if before is None:
                del os.environ[VARIABLE]
            else:
                os.environ[VARIABLE] = before


def install_in_child() -> None:
    """In the program's process: lists sites from the moment that Inductor is imported."""
    path = os.environ.pop(VARIABLE, "")
    if not path:
        return
    from opgraft.diagnostics.collect import arrival

    def begin(module: Any) -> None:
        from opgraft.compile import watching

        watching.install(Path(path))

    arrival.when_imported("torch._inductor.compile_fx", begin)


def _show(path: Path) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from opgraft.compile import watching

    console = Console()
    found = watching.read(path)
    if not found:
        console.print("no sites: no graph holds a registered op or an idiom that one could stand for")
        return
    table = Table("place", "site", "inputs", "chosen", "why", title=f"{len(found)} site{'s' if len(found) > 1 else ''}")
    for entry in found:
        place = f"{_short(entry['path'])}:{entry['line']}" if entry["line"] else "unknown"
        site = f"{entry['idiom']} ({entry['op']})" if entry["idiom"] else entry["op"]
        cells = (f"{place}\n{entry['text']}", site, "\n".join(entry["inputs"]), entry["choice"], entry["why"])
        table.add_row(*(escape(str(cell)) for cell in cells))
    console.print(table)


def _short(path: str) -> str:
    relative = os.path.relpath(path) if os.path.isabs(path) else path
    return relative if not relative.startswith("..") else path
