"""The page in a real browser: keys, filters, narrow screens. Runs where Chromium is installed."""

from __future__ import annotations

import html as escapes
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from opgraft.diagnostics.collect.events import read_events
from opgraft.diagnostics.diagnose.report import diagnose
from opgraft.diagnostics.report import html

STREAMS = Path(__file__).parents[1] / "streams"
BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed")

ACTS = """
<script>
function press(key) {
  (document.activeElement || document.body).dispatchEvent(new KeyboardEvent("keydown", {key: key, bubbles: true}));
  return document.activeElement.id;
}
window.addEventListener("load", function () {
  var out = {};
  out.next = [press("j"), press("j"), press("j")];
  out.previous = [press("k"), press("k"), press("k")];
  press("Enter");
  out.open = document.querySelectorAll("#f0 details[open]").length;
  out.folds = document.querySelectorAll("#f0 details").length;
  document.querySelectorAll("details").forEach(function (fold) { fold.open = true; });
  out.unfolded = document.documentElement.scrollWidth;
  document.querySelectorAll("details").forEach(function (fold) { fold.open = false; });
  press("Enter");
  press("Enter");
  out.closed = document.querySelectorAll("#f0 details[open]").length;
  var button = document.querySelector(".filters button[data-severity=warning]");
  var count = function () { return document.querySelectorAll("article:not([hidden])").length; };
  out.before = count(); button.click(); out.hidden = count();
  out.pressed = button.getAttribute("aria-pressed"); button.click(); out.after = count();
  out.wide = document.documentElement.scrollWidth; out.inner = window.innerWidth;
  out.bars = document.querySelectorAll(".bar > *").length;
  out.link = document.querySelector(".bar a").getAttribute("href");
  out.target = document.querySelector(out.link) !== null;
  var pre = document.createElement("pre"); pre.id = "acts"; pre.textContent = JSON.stringify(out);
  document.body.appendChild(pre);
});
</script>
"""


def browse(page: str, folder: Path, width: int) -> dict[str, Any]:
    """What the page does in a window of ``width`` pixels."""
    path = folder / "page.html"
    path.write_text(page.replace("</body>", ACTS + "</body>"))
    frame = folder / "frame.html"  # a window is never narrower than about 500 pixels, a frame is
    frame.write_text(f'<iframe id="f" src="page.html" width="{width}" height="900" style="border:0"></iframe>' + READ)
    command = [str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files"]
    command += [f"--user-data-dir={folder / 'profile'}", "--virtual-time-budget=4000", "--dump-dom"]
    done = subprocess.run([*command, frame.as_uri()], capture_output=True, text=True, timeout=120, check=True)
    found = re.search(r'<pre id="told">(.*?)</pre>', done.stdout, re.DOTALL)
    assert found, done.stdout[-2000:]
    told: dict[str, Any] = json.loads(escapes.unescape(found[1]))
    return told


READ = """
<script>
setTimeout(function () {
  var pre = document.createElement("pre"); pre.id = "told";
  pre.textContent = document.getElementById("f").contentDocument.getElementById("acts").textContent;
  document.body.appendChild(pre);
}, 1500);
</script>
"""


@pytest.mark.parametrize("width", [320, 390, 1280])
def test_keys_filters_and_width(tmp_path: Path, width: int) -> None:
    report = diagnose(read_events(STREAMS / "gnn-2.13.0.jsonl"))
    told = browse(html.to_html(report), tmp_path, width)
    assert told["next"] == ["f0", "f1", "f2"]
    assert told["previous"] == ["f1", "f0", "f0"]
    assert (told["open"], told["closed"]) == (told["folds"], 0)
    assert (told["before"], told["hidden"], told["after"]) == (4, 0, 4)
    assert told["pressed"] == "false"
    assert max(told["wide"], told["unfolded"]) <= width  # nothing sticks out: the page does not scroll sideways
    assert told["bars"] > 30
    assert told["target"]
