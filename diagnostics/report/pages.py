"""The pages of ``opgraft rules`` and ``docs/rules/``: the docstrings of the rule and check files, read without
importing them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from opgraft.diagnostics.kinds import BY_CODE, KINDS, Kind

_ROOT = Path(__file__).resolve().parents[1]
_FOLDERS = ("diagnose", "conform", "measure", "diagnose/known")
_FOUND_BY = {
    "diagnose": "`opgraft explain` and `watch()`, from what the run itself shows",
    "conform": "`opgraft doctor`, and `opgraft explain` for the ops that the run calls",
    "measure": "`opgraft compare`",
}


@dataclass(frozen=True)
class Page:
    """One page: ``title`` is the docstring's first line, ``text`` the rest."""

    kind: Kind
    title: str
    text: str
    source: str
    found_by: str


@lru_cache(maxsize=1)
def pages() -> dict[str, Page]:
    """Every page by code, in the order of the codes. Rules go before checks where both know a kind."""
    found: dict[str, Page] = {}
    for folder in _FOLDERS:
        # Of several checks that share a kind, the one of its name has the page.
        paths = sorted((_ROOT / folder).glob("*.py"), key=lambda path: (path.stem.replace("_", "-") not in KINDS, path))
        for path in paths:
            for page in _read(path):
                found.setdefault(page.kind.code, page)
    return {code: found[code] for code in BY_CODE if code in found}


def missing() -> tuple[str, ...]:
    """Codes that have no page."""
    return tuple(code for code in BY_CODE if code not in pages())


def page(name: str) -> Page | None:
    """The page of a code or of a kind's name."""
    code = name.upper() if name.upper() in BY_CODE else KINDS[name].code if name in KINDS else ""
    return pages().get(code)


def markdown(shown: Page) -> str:
    """The page as Markdown."""
    title = shown.title.rstrip(".")
    if not title.startswith(shown.kind.code):
        title = f"{shown.kind.code} {shown.kind.name}: {title[:1].lower()}{title[1:]}"
    remedies = ", ".join(f"`{name}`" for name in shown.kind.remedies)
    ending = f"Found by: {shown.found_by}.\n\nRemedies a finding may carry: {remedies}."
    return f"# {title}\n\n{_headings(shown.text)}\n\n{ending}\n"


def write_docs(folder: Path) -> tuple[Path, ...]:
    """Writes ``folder/CODE.md`` for every page and an index."""
    from opgraft.diagnostics.report.files import write_atomically

    folder.mkdir(parents=True, exist_ok=True)
    written = []
    index = ["# Kinds of finding", ""]
    for code, shown in pages().items():
        path = folder / f"{code}.md"
        write_atomically(path, markdown(shown).encode())
        written.append(path)
        index.append(f"- [{code} {shown.kind.name}]({code}.md)")
    write_atomically(folder / "README.md", ("\n".join(index) + "\n").encode())
    return (*written, folder / "README.md")


def main() -> None:
    """``python -m opgraft.diagnostics.report.pages docs/rules`` writes the documents."""
    import sys

    for path in write_docs(Path(sys.argv[1])):
        print(path)


def _read(path: Path) -> Iterator[Page]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    doc = ast.get_docstring(tree) or ""
    title, _, text = doc.partition("\n")
    named = {
        node.targets[0].id: str(node.value.value)
        for node in tree.body
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and isinstance(node.value, ast.Constant)
    }
    kind = KINDS.get(named.get("KIND", ""))
    if kind is not None:
        source = path.relative_to(_ROOT).as_posix()
        found_by = named.get("FOUND_BY") or _FOUND_BY.get(source.rpartition("/")[0], "")
        yield Page(kind, title.strip(), text.strip(), source, found_by)


def _headings(text: str) -> str:
    """Underlined headings, ``::`` blocks and lists of terms as Markdown."""
    lines = text.splitlines()
    out: list[str] = []
    code = False

    def close() -> None:
        while out and not out[-1]:
            out.pop()
        out.extend(["```", ""])

    for index, line in enumerate(lines):
        after = lines[index + 1] if index + 1 < len(lines) else ""
        if line and set(line) == {"-"}:
            continue
        heading = bool(after) and set(after) == {"-"} and not line.startswith(" ")
        if code and line and not line.startswith(" "):
            close()
            code = False
        if heading:
            out.append(f"## {line}")
        elif not code and line.rstrip().endswith("::"):
            words = line.rstrip()[:-2].rstrip()
            out.extend([f"{words}:", ""] if words else [])
            out.append("```python")
            code = True
        elif code:
            if line or out[-1] != "```python":
                out.append(line.removeprefix("    "))
        elif line.startswith("``") and line.rstrip().endswith("``") and after.startswith("    "):
            out.append(f"- {line.strip()}")
        elif line.startswith("    "):
            out.append(f"  {line.strip()}")
        else:
            out.append(line)
    if code:
        close()
    return "\n".join(out).rstrip()


if __name__ == "__main__":
    main()
