"""Prints the requirements of the named extras of pyproject.toml, one a line, with what a build needs."""

from __future__ import annotations

import re
import sys
from pathlib import Path


def extra(text: str, name: str) -> list[str]:
    # Python 3.10 has no tomllib, and this runs before anything is installed.
    found = re.search(rf"^{re.escape(name)} = \[(.*?)\]$", text, re.MULTILINE | re.DOTALL)
    if found is None:
        raise SystemExit(f"pyproject.toml has no extra called {name}")
    return re.findall(r'"([^"]+)"', found[1])


def main() -> None:
    text = (Path(__file__).resolve().parents[1] / "pyproject.toml").read_text()
    wanted = [line for name in sys.argv[1:] for line in extra(text, name)]
    print("\n".join(["setuptools>=77", "wheel", "ninja", *wanted]))


if __name__ == "__main__":
    main()
