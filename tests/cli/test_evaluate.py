"""`molflt evaluate` and `molflt leaderboard` from the command line."""

import csv
import json

import pytest

from molflt import cli
from molflt.evaluation import GROUPINGS, evaluate
from molflt.testing import write_toy_lmdb


@pytest.fixture
def best(finished_run):
    return str(finished_run.best_checkpoint)


def test_scores_breakdowns_and_files_come_from_one_command(best, tmp_path, capsys):
    """A table per grouping with intervals; CSV and report where they were asked for."""
    words = ["evaluate", best, "--by", "metal", "--by", "size", "--threshold", "0.5"]
    words += ["--csv", str(tmp_path / "rows.csv"), "--report", str(tmp_path / "report.html")]
    assert cli.main(words) == 0
    out, err = capsys.readouterr()
    for text in ("EwT 0.5 eV (%)", "overall", "bootstrap intervals", "metal", "1-20", "Spearman"):
        assert text in out
    scores = evaluate(best)
    for row in scores:
        assert f"{row.energy_mae:.4f} [" in out
    assert err.splitlines() == [f"molflt: wrote {tmp_path / name}" for name in ("rows.csv", "report.html")]
    with (tmp_path / "rows.csv").open(newline="") as file:
        assert len(list(csv.DictReader(file))) == sum(row.num_systems for row in scores)
    assert "<canvas" in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_several_checkpoints_in_json(best, finished_run, capsys):
    """Each, their mean with its standard deviations, and the ensemble; groups have their name."""
    last = str(finished_run.last_checkpoint)
    words = ["evaluate", best, last, "--split", "val_a", "--json", "--by", "adsorbate"]
    assert cli.main(words) == 0
    rows = json.loads(capsys.readouterr().out)
    plain = [row for row in rows if not row["group"]]
    assert [row["method"] for row in plain] == [best, last, "mean of 2", "ensemble of 2"]
    assert set(plain[2]["stds"]) == set(plain[3]["intervals"])
    assert all(row["group"].startswith("adsorbate=") for row in rows[4:])
    assert sum(row["num_systems"] for row in rows[4:]) == 7


def test_the_groupings_offered_are_those_there_are():
    """The command line names them without importing the evaluation."""
    assert set(cli.evaluate.GROUPINGS) == set(GROUPINGS)


def test_a_leaderboard_file_is_made_checked_and_scored(best, tmp_path, capsys):
    """Status 0 for a right file; for a wrong one 1, with a line per problem."""
    for number, domain in enumerate(("id", "ood_ads", "ood_cat", "ood_both")):
        write_toy_lmdb(tmp_path / f"val_{domain}.lmdb", 2 + number, first_seed=10 * number)
    data = ["--data", str(tmp_path), "--part", "val"]
    output = str(tmp_path / "out.npz")
    assert cli.main(["leaderboard", "make", output, best, *data]) == 0
    assert "id 2, ood_ads 3, ood_cat 4, ood_both 5 systems" in capsys.readouterr().err
    assert cli.main(["leaderboard", "check", output, *data]) == 0
    assert cli.main(["leaderboard", "score", output, "--data", str(tmp_path), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out.partition("\n")[2])
    assert [row["num_systems"] for row in rows] == [2, 3, 4, 5]
    write_toy_lmdb(tmp_path / "test_id.lmdb", 3, labels=False)
    for domain in ("ood_ads", "ood_cat", "ood_both"):
        write_toy_lmdb(tmp_path / f"test_{domain}.lmdb", 2, first_seed=90, labels=False)
    assert cli.main(["leaderboard", "check", output, "--data", str(tmp_path)]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    lines = err.splitlines()
    assert lines[0] == f"molflt: error: {output}: id: 1 ids are missing (1002)"
    assert len(lines) == 7
    assert cli.main(["leaderboard", "score", output, "--data", str(tmp_path), "--part", "test"]) == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["evaluate", "{best}", "--by", "colour"], "invalid choice: 'colour'"),
        (["evaluate", "{best}", "--threshold", "0"], "must be above 0"),
        (["evaluate", "{best}", "--report", "{tmp}/no/report.html"], "in a folder that exists"),
        (["evaluate", "{best}", "--csv", "{tmp}"], "in a folder that exists"),
        (["evaluate", "{best}", "--csv", "{tmp}/rows.ckpt"], "a name that ends in .csv"),
        (["evaluate", "{best}", "--report", "{tmp}/rows.csv"], "a name that ends in .html"),
        (["evaluate", "{tmp}/a.csv", "--csv", "{tmp}/../{name}/a.csv"], "is an input of the command"),
        (["evaluate", "{best}", "{tmp}/a.html", "--report", "{tmp}/a.html"], "is an input of the command"),
        (["evaluate", "{best}", "--csv", "/dev/full"], "a name that ends in .csv"),
        (["evaluate", "{best}", "--device", "warp"], "--device warp cannot be used"),
        (["leaderboard", "make", "{tmp}/a.npz", "{tmp}/a.npz", "--data", "x"], "is an input of the command"),
        (
            ["leaderboard", "make", "{tmp}/a.npz", "{best}", "--data", "x", "--device", "meta"],
            "--device meta cannot be used",
        ),
        (["leaderboard", "check", "{tmp}/absent.npz", "--data", "{tmp}"], "no file"),
        (["leaderboard", "make", "{tmp}/out.npz", "{best}", "--data", "{tmp}"], "has no split 'test_id'"),
        (["leaderboard", "make", "{tmp}/out.npz", "{best}"], "--data"),
    ],
)
def test_bad_words_are_one_line(words, message, best, tmp_path, capsys):
    """Status 2, and nothing made."""
    values = {"best": best, "tmp": tmp_path, "name": tmp_path.name}
    assert cli.main([word.format(**values) for word in words]) == 2
    out, err = capsys.readouterr()
    assert (out, len(err.splitlines())) == ("", 1)
    assert message in err
    assert list(tmp_path.iterdir()) == []
