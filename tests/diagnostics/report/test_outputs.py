"""What is written: valid against its schema, escaped, whole or not at all."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from io import StringIO
from pathlib import Path

import jsonschema
import msgspec
import pytest
from rich.console import Console

from opgraft.diagnostics.collect.events import read_events
from opgraft.diagnostics.diagnose.report import diagnose
from opgraft.diagnostics.kinds import KINDS
from opgraft.diagnostics.model import Callee, Cause, Cost, Counts, Finding, Location, Remedy, Report
from opgraft.diagnostics.report import html, markdown, pages, sarif, terminal
from opgraft.diagnostics.report import json as report_json

STREAMS = Path(__file__).parents[1] / "streams"
EVIL = "<script>alert('&\"x')</script> [bold]`*_{{ 7*7 }}"


def hostile() -> Report:
    place = Location(path=f"/{EVIL}.py", line=3, function=EVIL, text=f"    y = {EVIL}  # é", column=4, end_column=9)
    finding = Finding(
        kind="opaque-call",
        code="OG101",
        severity="warning",
        message=EVIL,
        location=place,
        stack=(place,),
        sites=(place, place),
        callee=Callee(name=EVIL, distribution=EVIL, owner="extension"),
        causes=(Cause(gb_type=EVIL, context=EVIL, explanation=EVIL, hints=(EVIL,)),),
        counts=Counts(sites=2, compiles=3, per_step=8),
        cost=Cost(us_per_step=41.0, low=37.0, high=45.0, share_of_step=0.004, how="measured"),
        remedies=(Remedy(id="register-op", text=EVIL, price=EVIL, diff=EVIL),),
        evidence=(EVIL,),
    )
    return Report(opgraft="0", torch=EVIL, findings=(finding,), degraded=(EVIL,))


def reports() -> list[Report]:
    return [
        hostile(),
        Report(opgraft="0", torch="2.13.0"),
        *(diagnose(read_events(p)) for p in STREAMS.glob("*.jsonl")),
    ]


def test_the_shipped_schema_is_that_of_the_model() -> None:
    assert report_json.json_schema() == json.loads(json.dumps(report_json.make_schema()))


def test_every_output_satisfies_the_schema_and_reads_back(tmp_path: Path) -> None:
    for report in reports():
        report_json.write_json(report, tmp_path / "r.json")
        jsonschema.validate(json.loads((tmp_path / "r.json").read_bytes()), report_json.json_schema())
        assert report_json.read_json(tmp_path / "r.json") == report


def test_another_file_is_refused_with_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "r.json").write_text("{}")
    with pytest.raises(ValueError, match="is not a report of opgraft"):
        report_json.read_json(tmp_path / "r.json")
    later = msgspec.structs.replace(Report(opgraft="0", torch=""), schema=99)
    report_json.write_json(later, tmp_path / "r.json")
    with pytest.raises(ValueError, match="schema 99"):
        report_json.read_json(tmp_path / "r.json")


class Tags(HTMLParser):
    """Counts tags, and collects what the page would load from elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: dict[str, int] = {}
        self.loads: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] = self.tags.get(tag, 0) + 1
        self.loads += [value or "" for name, value in attrs if name == "src" or (tag == "link" and name == "href")]


def test_the_page_is_escaped_and_needs_nothing_else() -> None:
    for report in reports():
        page = html.to_html(report)
        tags = Tags()
        tags.feed(page)
        assert tags.tags["script"] == 1
        assert tags.loads == []
        assert "<script>alert" not in page
        assert tags.tags.get("article", 0) == len(report.findings)


def test_the_terminal_shows_markup_as_it_is_and_fits() -> None:
    for width in (40, 80, 160):
        for report in reports():
            out = StringIO()
            console = Console(file=out, width=width, force_terminal=False)
            terminal.print_report(report, console=console, verbose=True, notes=True)
            assert max(map(len, out.getvalue().splitlines()), default=0) <= width
    out = StringIO()
    terminal.print_report(hostile(), console=Console(file=out, width=160))
    assert "<script>alert" in out.getvalue()
    assert "under 1 % of the step" in out.getvalue()


def test_markdown_gives_html_no_meaning() -> None:
    text = markdown.to_markdown(hostile())
    outside = "\n".join(part for i, part in enumerate(text.split("```")) if i % 2 == 0)
    assert "\n<script>" not in outside.replace("\\<", "")


def test_sarif_has_what_viewers_ask_for() -> None:
    for report in reports():
        run = sarif.to_sarif(report)["runs"][0]
        assert [result["ruleId"] for result in run["results"]] == [found.code for found in report.findings]
        rules = run["tool"]["driver"]["rules"]
        assert all(rules[result["ruleIndex"]]["id"] == result["ruleId"] for result in run["results"])
        json.dumps(run)


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "r.json"
    path.write_text("old")

    def fail(*args: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("os.replace", fail)
    with pytest.raises(OSError, match="disk full"):
        report_json.write_json(hostile(), path)
    assert [p.name for p in tmp_path.iterdir()] == ["r.json"]
    assert path.read_text() == "old"


@pytest.mark.parametrize("kind", KINDS.values(), ids=lambda kind: kind.code)
def test_every_kind_has_a_page(kind: object) -> None:
    page = pages.page(kind.code)  # type: ignore[attr-defined]
    assert page is not None
    assert len(page.text) > 200


def test_the_documents_are_those_of_the_rules(tmp_path: Path) -> None:
    docs = Path(__file__).parents[3] / "docs" / "rules"
    for path in pages.write_docs(tmp_path):
        assert (docs / path.name).read_text() == path.read_text(), (
            f"run `python -m opgraft.diagnostics.report.pages {docs}`"
        )
