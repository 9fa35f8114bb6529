"""torch's own message about a registration names the program's line, also while the program is watched."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import torch

first = torch.library.Library("place_of_one", "DEF")


class Mine(torch.library.Library):
    def __init__(self, name):
        super().__init__(name, "DEF")


def again():
    return torch.library.Library("place_of_one", "DEF")


Mine("place_of_two")
for make in (again, lambda: Mine("place_of_one")):
    try:
        make()
    except RuntimeError as error:
        print(error)
"""


def test_the_program_is_named_as_without_a_watch(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    bare = subprocess.run(
        [sys.executable, "program.py"], cwd=tmp_path, capture_output=True, timeout=240, check=True, text=True
    )
    command = [sys.executable, "-m", "opgraft.diagnostics.cli", "explain", "-q", "--json", "out.json", "program.py"]
    watched = subprocess.run(command, cwd=tmp_path, capture_output=True, timeout=240, check=True, text=True)
    assert "program.py:13" in bare.stdout
    assert watched.stdout == bare.stdout
    found = json.loads((tmp_path / "out.json").read_bytes())["findings"]
    assert ("bad-schema", 13) in [(one["kind"], one["location"]["line"]) for one in found]
