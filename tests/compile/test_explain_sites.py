"""``opgraft explain --sites``: a program's sites, whether it uses the choice or a plain ``torch.compile``."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys, torch
import torch.nn.functional as F
def function(x):
    return F.gelu(x * 2, approximate="tanh") + 1
how = {"backend": "opgraft"} if "opgraft" in sys.argv else {}
if "none" in sys.argv:
    function = torch.sin
torch.compile(function, **how)(torch.randn(8, 16))
print("the program ran", sys.argv[1:])
"""


@pytest.mark.timeout(200)
@pytest.mark.parametrize("how", ["plain", "opgraft", "none"])
def test_every_site_is_listed(how: str, tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    explain = [sys.executable, "-m", "opgraft.diagnostics.cli", "explain", "--no-check-ops", "--sites"]
    environment = {**os.environ, "COLUMNS": "200"}
    done = subprocess.run([*explain, str(script), how], capture_output=True, text=True, timeout=180, env=environment)
    assert done.returncode == 0, done.stderr
    assert f"the program ran ['{how}']" in done.stdout
    if how == "none":
        assert "no sites" in done.stdout
    else:
        assert "program.py:5" in done.stdout
        assert "tanh-gelu (opgraft::gelu)" in done.stdout
        assert "1 site" in done.stdout
