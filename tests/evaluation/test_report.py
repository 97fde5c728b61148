"""The HTML report: its data, that it needs nothing from elsewhere, and its page in a browser."""

import json
import re
import shutil
import subprocess
from dataclasses import replace

import pytest
import torch

from molflt.evaluation import evaluate_checkpoints, write_report
from molflt.evaluation.report import render_report, report_data, worst_rows

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
BROWSER = next((path for name in BROWSERS if (path := shutil.which(name))), None)

CLICKS = """
<script>
addEventListener("load", () => {
  const view = document.getElementById("view"), seen = [];
  const drawn = id => document.getElementById(id).toDataURL();
  const found = { errors: window.failures, systems: [], parity: [] };
  seen.push(view.toDataURL());
  document.querySelectorAll("#worst tr")[3].click();
  found.named = document.getElementById("named").textContent;
  found.chosen = document.querySelectorAll("#worst tr.chosen").length;
  seen.push(view.toDataURL());
  view.dispatchEvent(new PointerEvent("pointerdown", { clientX: 100, clientY: 100, bubbles: true }));
  view.dispatchEvent(new PointerEvent("pointermove", { clientX: 160, clientY: 130, bubbles: true }));
  view.dispatchEvent(new PointerEvent("pointerup", { bubbles: true }));
  seen.push(view.toDataURL());
  view.dispatchEvent(new PointerEvent("pointermove", { clientX: 10, clientY: 10, bubbles: true }));
  found.stays = view.toDataURL() === seen[2];
  view.dispatchEvent(new WheelEvent("wheel", { deltaY: -300 }));
  seen.push(view.toDataURL());
  found.views = new Set(seen).size;
  const select = document.getElementById("split");
  for (const option of [...select.options]) {
    select.value = option.value;
    select.dispatchEvent(new Event("change"));
    found.systems.push([option.value, document.getElementById("shown").textContent]);
    found.parity.push(drawn("parity") + drawn("histogram") + drawn("size"));
  }
  found.parity = new Set(found.parity).size;
  found.rows = document.querySelectorAll("#scores tr").length;
  document.body.setAttribute("data-found", JSON.stringify(found));
});
</script>
"""


@pytest.fixture(scope="module")
def evaluation(finished_run):
    return evaluate_checkpoints([finished_run.best_checkpoint], by=["metal"], with_systems=True, resamples=20)


def data_of(page):
    return json.loads(re.search(r"const data = (.*);\n", page)[1])


def test_the_page_holds_every_system_and_the_worst_twenty(evaluation):
    """Targets, energies and sizes of both splits; the twelve by falling error, atoms as in the data."""
    data = data_of(render_report(evaluation))
    assert data == report_data(evaluation) | {"splits": data["splits"], "worst": data["worst"]}
    for split in data["splits"]:
        predictions = evaluation.predictions[split["name"]]
        assert split["sid"] == predictions.sid.tolist()
        assert split["target"] == pytest.approx(predictions.target.tolist(), abs=6e-5)
        assert split["energy"] == pytest.approx(predictions.energy.tolist(), abs=6e-5)
    errors = [abs(system["energy"] - system["target"]) for system in data["worst"]]
    assert errors == sorted(errors, reverse=True)
    assert len(errors) == 12
    for system in data["worst"]:
        counts = {len(system[name]) for name in ("symbols", "positions", "radii", "colors", "tags")}
        assert len(counts) == 1
        assert system["tags"].count(2) == 1
    assert len({system["sid"] for system in data["worst"]}) == 12


def test_only_twenty_are_shown_of_many(evaluation):
    """The ones with the largest errors of either sign."""
    predictions = evaluation.predictions["val_a"]
    energy = torch.linspace(-3.0, 1.0, 41)
    many = replace(
        evaluation,
        predictions={"val_a": replace(predictions, energy=energy, target=torch.zeros(41))},
    )
    rows = worst_rows(many)
    assert rows == [("val_a", row) for row in range(20)]


def test_the_page_loads_nothing_and_names_cannot_break_it(evaluation, tmp_path):
    """No address in it, and a split called as the end of a script stays text."""
    evil = "</script><script>alert(1)</script>"
    renamed = replace(evaluation, root=evil, energy_meaning="<!-- \u2028 π")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("molflt.evaluation.report.worst_rows", lambda evaluation: [])
        write_report(tmp_path / "report.html", renamed)
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert page.count("<script>") == page.count("</script>") == 1
    assert data_of(page)["root"] == evil
    assert not re.search(r"https?:|//[a-z]|src=|href=|url\(|import |fetch", page.replace("// ---", ""))
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]


@pytest.mark.skipif(BROWSER is None, reason="needs Chromium or Chrome on the PATH")
def test_the_page_works_in_a_browser(evaluation, tmp_path):
    """Headless: no error; a click on a row shows that system, dragging and the wheel change the picture, each
    split has plots of its own."""
    page = render_report(evaluation)
    watch = (
        "<script>window.failures = [];"
        'addEventListener("error", event => window.failures.push(event.message));</script>'
    )
    page = page.replace("<body>", "").replace("<style>", f"{watch}<style>", 1).replace("</html>", CLICKS)
    (tmp_path / "page.html").write_text(page, encoding="utf-8")
    options = ("--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=5000", "--dump-dom")
    words = [BROWSER, *options, f"--user-data-dir={tmp_path / 'profile'}", (tmp_path / "page.html").as_uri()]
    done = subprocess.run(words, capture_output=True, text=True, timeout=600)
    [text] = re.findall(r'data-found="([^"]*)"', done.stdout) or pytest.fail(done.stderr[-2000:])
    found = json.loads(text.replace("&quot;", '"').replace("&amp;", "&"))
    assert found["errors"] == []
    third = report_data(evaluation)["worst"][2]
    assert found["named"].startswith(f"sid {third['sid']} of {third['split']}: {third['formula']}")
    assert (found["chosen"], found["views"], found["stays"]) == (1, 4, True)
    assert found["systems"] == [["all", "12 systems"], ["val_a", "7 systems"], ["val_b", "5 systems"]]
    assert found["parity"] == 3
    assert found["rows"] == 1 + len(evaluation.scores)
