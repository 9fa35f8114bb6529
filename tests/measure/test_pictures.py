"""The HTML fragment: escaped, well-formed, and its pictures hold what the table says."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import pytest
from rich.console import Console

from opgraft.diagnostics.model import ArmResult, Comparison, Ledger, LedgerTerm, Prediction
from opgraft.diagnostics.report import figures
from opgraft.diagnostics.report.comparison import comparison_html, print_comparison

LEDGER = Ledger(
    arm="op",
    terms=(
        LedgerTerm(name="kernel alone", us_per_step=-440, how="measured"),
        LedgerTerm(
            name="lost fusion", us_per_step=1037, how="measured", bytes_per_step=4_300_000_000, launches_per_step=16
        ),
        LedgerTerm(name="graph breaks", us_per_step=None, how="counted", detail="<8 a step>"),
        LedgerTerm(name="unexplained", us_per_step=107, how="measured"),
    ),
    total_us=704,
    amdahl_bound=1.05,
    share_of_step=0.28,
)  # fmt: skip
COMPARISON = Comparison(
    arms=(
        ArmResult(name="compiler", isolated_us=312, step_us=7310, step_low=7300, step_high=7320, breaks=0, graphs=1),
        ArmResult(name="op", step_us=8010, ratio=0.912, ratio_low=0.909, ratio_high=0.915, verdict="SLOWER", breaks=0),
        ArmResult(name="raw", failed="<script>alert(1)</script>"),
    ),
    noise_low=0.998,
    noise_high=1.002,
    ledgers=(LEDGER,),
    predictions=(Prediction(arm="op", predicted_us=7900, measured_us=8010, error=-0.0137),),
    sentence="a < b & c",
    environment={"device": "<b>"},
)


def test_nothing_of_a_report_reaches_the_page_unescaped() -> None:
    page = comparison_html(COMPARISON)
    assert "<script>" not in page
    assert "&lt;script&gt;" in page
    assert "a &lt; b &amp; c" in page
    assert "device &lt;b&gt;" in page


@pytest.mark.parametrize("picture", [figures.intervals(COMPARISON), figures.waterfall(LEDGER)])
def test_pictures_are_xml_with_readable_text(picture: str | None) -> None:
    assert picture is not None
    root = ElementTree.fromstring(picture)
    assert root.tag.endswith("svg")
    words = "".join(root.itertext())
    assert "lost fusion" in words or "SLOWER" in words


def test_the_fragment_is_well_formed() -> None:
    ElementTree.fromstring(f"<body>{comparison_html(COMPARISON)}</body>")


@pytest.mark.parametrize("width", [80, 160])
def test_the_terminal_shows_the_whole_table_at_both_widths(width: int, capsys: pytest.CaptureFixture[str]) -> None:
    print_comparison(COMPARISON, Console(width=width, force_terminal=False))
    out = capsys.readouterr().out
    assert max(len(line) for line in out.splitlines()) <= width
    for words in ("compiler", "0.912 ± 0.003", "SLOWER", "lost fusion, +16 launches, +4.3 GB", "+1,037", "a < b & c"):
        assert words in out


def test_an_empty_comparison_prints_its_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    print_comparison(Comparison(arms=(), sentence="Nothing was measured."), Console(width=80))
    assert "Nothing was measured." in capsys.readouterr().out
