"""`molflt predict` on trees, lists and long streams of structures; its exit status and what it leaves."""

import copy
import csv
import io
import json
import os
import weakref
from pathlib import Path

import numpy as np
import pytest
from ase.build import molecule
from ase.db import connect
from ase.io import read, write

from molflt import cli
from molflt.data.structures import read_structures
from molflt.prediction import Predictor

STRUCTURES = sorted((Path(__file__).parents[2] / "datasets" / "fcc111" / "structures").iterdir())


@pytest.fixture
def best(finished_run):
    return str(finished_run.best_checkpoint)


@pytest.fixture
def frames(tmp_path):
    """Seven molecules in one file."""
    names = ["H2O", "CO", "CH4", "H2", "CO2", "O2", "C2H2"]
    write(tmp_path / "frames.xyz", [molecule(name) for name in names])
    return str(tmp_path / "frames.xyz"), names


def rows_of(path):
    with open(path, encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_a_folder_a_pattern_and_a_list_are_predicted_in_order(best, frames, tmp_path, capsys, monkeypatch):
    """Each frame a row with the energy that Python finds; the training data are named on stderr."""
    (tmp_path / "tree" / "deep").mkdir(parents=True)
    for name in ("b.xyz", "deep/a.xyz"):
        write(tmp_path / "tree" / name, molecule("CH4"))
    (tmp_path / "tree" / "notes.txt").write_text("none")
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{STRUCTURES[0]}\n"))
    words = [str(tmp_path / "tree"), frames[0], "-", str(tmp_path / "fr*.xyz")]
    output = tmp_path / "out.csv"
    assert cli.main(["predict", best, *words, "--output", str(output), "--batch-size", "3"]) == 0
    rows = rows_of(output)
    tree = [str(tmp_path / "tree" / name) for name in ("b.xyz", "deep/a.xyz")]
    assert [row["path"] for row in rows] == [*tree, *[frames[0]] * 7, str(STRUCTURES[0]), *[frames[0]] * 7]
    assert [row["frame"] for row in rows] == [*"00", *"0123456", "0", *"0123456"]
    predictor = Predictor.from_checkpoint(best)
    expected = predictor.predict(read_structures(frames[0]))
    assert [float(row["energy"]) for row in rows[2:9]] == pytest.approx(
        [row.energy for row in expected], abs=1e-10
    )
    out, err = capsys.readouterr()
    assert out == ""
    assert "skipped 1 files that are no structures" in err
    assert "trained on 11 systems of 5 to 17 atoms" in err


def test_energies_do_not_depend_on_batch_size_or_order(best, frames, tmp_path):
    """To 1e-10 eV, and uncertainties, which are computed in single precision, to 1e-6 eV."""
    found = []
    for words in ([frames[0], str(STRUCTURES[0])], [str(STRUCTURES[0]), frames[0]]):
        for size in ("1", "4", "32"):
            output = tmp_path / f"{len(found)}.jsonl"
            assert cli.main(["predict", best, *words, "--output", str(output), "--batch-size", size]) == 0
            items = [json.loads(line) for line in output.read_text().splitlines()]
            items.sort(key=lambda item: (item["path"], item["frame"]))
            rows = [[item["energy"], item["uncertainty"]] for item in items]
            found.append(np.array(rows, dtype=float))
    for other in found[1:]:
        np.testing.assert_allclose(other[:, 0], found[0][:, 0], rtol=0, atol=1e-10)
        np.testing.assert_allclose(other[:, 1], found[0][:, 1], rtol=0, atol=1e-6)


def test_strict_stops_at_the_first_bad_structure(best, frames, tmp_path, capsys):
    """Rows up to and with it are kept; status 1 after good ones, 2 before any."""
    output = tmp_path / "out.csv"
    absent = str(tmp_path / "absent.xyz")
    assert cli.main(["predict", best, frames[0], absent, frames[0], "--strict", "--output", str(output)]) == 1
    assert [row["error"] != "" for row in rows_of(output)] == [False] * 7 + [True]
    assert cli.main(["predict", best, absent, frames[0], "--strict", "--output", str(output)]) == 2
    assert [row["path"] for row in rows_of(output)] == [absent]
    assert len(capsys.readouterr().err.splitlines()) == 3, "two errors and the note of what succeeded"


def test_an_interrupt_keeps_the_rows_that_are_done(best, frames, tmp_path, monkeypatch, capsys):
    """Status 130, and the file holds the batches before the interrupt; so does the table."""

    def interrupted(paths, radius):
        yield from read_structures(frames[0])[:5]
        raise KeyboardInterrupt

    monkeypatch.setattr("molflt.prediction.iter_inputs", interrupted)
    words = ["predict", best, "x", "--batch-size", "2"]
    assert cli.main([*words, "--output", str(tmp_path / "out.csv")]) == 130
    assert [row["formula"] for row in rows_of(tmp_path / "out.csv")] == ["H2O", "CO", "CH4", "H2"]
    capsys.readouterr()
    assert cli.main(words) == 130
    assert sum("xyz" in line for line in capsys.readouterr().out.splitlines()) == 4


def test_long_outputs_are_several_tables(best, frames, monkeypatch, capsys):
    """Each with its meaning below; all rows are in them."""
    monkeypatch.setattr("molflt.cli.predict.TABLE_ROWS", 3)
    assert cli.main(["predict", best, frames[0], "--redraws", "0"]) == 0
    out = capsys.readouterr().out
    assert out.count("energy: adsorption energy") == 3
    assert out.count("trained on 11 systems") == 3
    assert sum("frames.xyz" in line for line in out.splitlines()) == 7


def test_an_ensemble_and_relaxed_structures_from_the_command_line(best, finished_run, frames, tmp_path):
    """Two checkpoints: mean, spread, and a file per structure at the mean displacement."""
    last = str(finished_run.last_checkpoint)
    words = ["predict", best, frames[0], "--ensemble", last, "--output", str(tmp_path / "out.jsonl")]
    assert cli.main([*words, "--write-relaxed", str(tmp_path / "relaxed")]) == 0
    items = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    expected = Predictor.from_checkpoint([best, last]).predict(read_structures(frames[0]))
    assert [item["energy"] for item in items] == pytest.approx([row.energy for row in expected], abs=1e-10)
    assert {item["uncertainty_kind"] for item in items} == {"ensemble"}
    files = sorted((tmp_path / "relaxed").iterdir())
    assert [path.name for path in files] == [f"{row:06d}-frames.xyz-{row}.extxyz" for row in range(7)]
    for path, row in zip(files, expected, strict=True):
        np.testing.assert_allclose(read(path).positions, row.relaxed_atoms().positions, atol=1e-7)


def test_relaxed_structures_need_a_head_for_them(tiny_config, tmp_path, frames, capsys):
    """Refused before anything is made."""
    from molflt.checkpoint import Checkpoint, CheckpointMetadata, model_from_config, save_checkpoint

    config = tiny_config(tmp_path / "run", **{"optim.delta_pos_weight": [0, 0]})
    checkpoint = Checkpoint(config, model_from_config(config).eval(), CheckpointMetadata())
    save_checkpoint(tmp_path / "energy.ckpt", checkpoint)
    words = ["predict", str(tmp_path / "energy.ckpt"), frames[0], "--write-relaxed", str(tmp_path / "out")]
    assert cli.main(words) == 2
    assert "needs networks that predict Δpos" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["{frames}", "--output", "{frames}.extxyz/../frames.csv"], "in a folder that exists"),
        (["{tmp}/own.db", "--output", "{tmp}/own.db"], "among the structures to predict"),
        (["{frames}", "--device", "warp"], "--device warp cannot be used"),
        (["{frames}", "--device", "meta"], "--device meta cannot be used"),
        (["{frames}", "--redraws", "-1"], "must be at least 0"),
        (["{frames}", "--write-relaxed", "{tmp}"], "is not empty"),
        (["{frames}", "--ensemble", "{tmp}/absent.ckpt"], "no checkpoint at"),
        (["-"], "no structures were given"),
    ],
)
def test_bad_options_are_one_line_and_change_nothing(
    best, frames, tmp_path, monkeypatch, capsys, words, message
):
    """Status 2; an input named as output keeps its content."""
    with connect(tmp_path / "own.db") as database:
        database.write(molecule("H2O"))
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    words = [word.format(frames=frames[0], tmp=tmp_path) for word in words]
    assert cli.main(["predict", best, *words]) == 2
    out, err = capsys.readouterr()
    assert (out, len(err.splitlines())) == ("", 1)
    assert message in err
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_no_more_than_a_batch_of_structures_is_held(best, frames, tmp_path, monkeypatch):
    """Of 97 streamed frames at most those of two batches of five are alive at a time, in any output."""
    [*kept] = read_structures(frames[0])
    alive = []
    most = []

    def stream(paths, radius):
        for number in range(97):
            structure = copy.copy(kept[number % 7])
            structure.data = structure.data.clone()
            alive.append(weakref.ref(structure.data))
            most.append(sum(reference() is not None for reference in alive))
            yield structure

    monkeypatch.setattr("molflt.prediction.iter_inputs", stream)
    monkeypatch.setattr("molflt.cli.predict.TABLE_ROWS", 5)
    for name in ("csv", "jsonl", "extxyz", "db", None):
        alive.clear()
        most.clear()
        output = [] if name is None else ["--output", str(tmp_path / f"out.{name}")]
        assert cli.main(["predict", best, "x", "--batch-size", "5", "--redraws", "0", *output]) == 0
        assert len(most) == 97
        assert max(most) <= 11


def test_relaxed_structures_may_go_below_the_input_folder(best, tmp_path):
    """They are no input of the same command, though they appear while it reads."""
    (tmp_path / "a").mkdir()
    for name in ("a/x.xyz", "z.xyz"):
        write(tmp_path / name, molecule("H2O"))
    words = ["predict", best, str(tmp_path), "--output", str(tmp_path / "out.extxyz"), "--batch-size", "1"]
    assert cli.main([*words, "--write-relaxed", str(tmp_path / "m")]) == 0
    assert len(list((tmp_path / "m").iterdir())) == 2
    assert len(read(tmp_path / "out.extxyz", ":")) == 2


def test_names_that_are_no_text_are_printed_by_their_codes(best, tmp_path, capfd):
    """A name in another encoding than UTF-8, in the table and in files."""
    name = os.fsencode(tmp_path) + b"/caf\xe9.xyz"
    write(tmp_path / "ok.xyz", molecule("H2O"))
    os.rename(tmp_path / "ok.xyz", name)
    words = ["predict", best, os.fsdecode(name), "--redraws", "0"]
    assert cli.main(words) == 0
    assert "caf\\udce9.xyz" in capfd.readouterr().out
    for suffix in ("csv", "jsonl", "extxyz", "db"):
        assert cli.main([*words, "--output", str(tmp_path / f"out.{suffix}")]) == 0
    with open(tmp_path / "out.csv", encoding="utf-8", errors="surrogateescape", newline="") as file:
        assert next(csv.DictReader(file))["path"] == os.fsdecode(name)


def test_a_list_on_standard_input_may_hold_any_bytes(best, tmp_path, monkeypatch):
    """Names that are no UTF-8 under a strict encoding; a NUL is an error in the place of its line."""
    write(tmp_path / "ok.xyz", molecule("H2O"))
    name = os.fsencode(tmp_path) + b"/caf\xe9.xyz"
    os.rename(tmp_path / "ok.xyz", name)
    lines = b"".join([name, b"\n", name, b"\0x\r\n\n", name, b"\n"])
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(lines), encoding="utf-8", errors="strict"))
    output = tmp_path / "out.jsonl"
    assert cli.main(["predict", best, "-", "--output", str(output), "--redraws", "0"]) == 1
    items = [json.loads(line) for line in output.read_text().splitlines()]
    assert [item["error"] is None for item in items] == [True, False, True]
    assert items[0]["path"] == items[2]["path"] == os.fsdecode(name)
    assert "holds a NUL" in items[1]["error"]


def test_no_folder_is_made_where_nothing_is_predicted(best, tmp_path):
    """Only bad structures: neither the folder nor its parents appear."""
    words = ["predict", best, str(tmp_path / "absent.xyz"), "--write-relaxed", str(tmp_path / "a" / "b")]
    assert cli.main(words) == 2
    assert list(tmp_path.iterdir()) == []
