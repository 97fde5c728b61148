"""Output files: the same rows in every format, whole after an interrupt, and nobody's input overwritten."""

import csv
import json
import sqlite3
from pathlib import Path

import ase.db
import numpy as np
import pytest
from ase.io import read

from molflt.data.structures import StructureError
from molflt.errors import InputError
from molflt.prediction import OUTPUT_COLUMNS, RelaxedFolder, check_output, open_writer
from molflt.prediction.writers import CsvWriter

ERROR = StructureError("b ä.cif", 3, "is empty; give a file with a structure")


def written(path, outcomes):
    with open_writer(path, "eV of a test") as writer:
        for outcome in outcomes:
            writer.write(outcome)
    return path


def test_csv_and_json_lines_hold_every_column(predictions, tmp_path):
    """Energies in full precision, warnings, and an error with its place instead of a bad structure."""
    outcomes = [predictions[0], ERROR, predictions[1]]
    with written(tmp_path / "out.csv", outcomes).open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    lines = written(tmp_path / "out.jsonl", outcomes).read_text(encoding="utf-8").splitlines()
    objects = [json.loads(line) for line in lines]
    assert tuple(rows[0]) == tuple(objects[0]) == OUTPUT_COLUMNS
    for row, item, outcome in zip(rows[::2], objects[::2], predictions, strict=True):
        assert float(row["energy"]) == item["energy"] == outcome.energy
        assert float(row["uncertainty"]) == item["uncertainty"] == outcome.uncertainty > 0
        assert item["warnings"] == list(outcome.notes)
        assert row["warnings"] == "; ".join(outcome.notes)
        assert (row["path"], item["path"]) == (outcome.source,) * 2
        assert (item["id"], item["pbc"], item["n_atoms"]) == (outcome.id, outcome.pbc, outcome.n_atoms)
        assert (item["formula"], item["tag_source"]) == (outcome.formula, outcome.tag_source)
        assert (item["energy_meaning"], item["uncertainty_kind"]) == ("eV of a test", "redraws")
        assert row["unlike_training"] == str(item["unlike_training"])
    assert [item["unlike_training"] for item in objects] == [False, None, True]
    assert (rows[1]["path"], rows[1]["frame"], rows[1]["energy"]) == ("b ä.cif", "3", "")
    assert rows[1]["error"] == objects[1]["error"] == str(ERROR)
    assert objects[1]["energy"] is None


def rows_in(path):
    """Rows of an ASE database, which is closed again."""
    with ase.db.connect(path) as database:
        return database.count()


def test_structures_are_written_with_their_rows(predictions, tmp_path):
    """extxyz and ASE database: atoms as given, tags, fixed atoms; the energy not as that of the positions."""
    outcomes = [predictions[0], ERROR, predictions[1]]
    frames = read(written(tmp_path / "out.extxyz", outcomes), ":")
    with ase.db.connect(written(tmp_path / "out.db", outcomes)) as database:
        rows = list(database.select())
        assert database.count("unlike_training=True") == 1
    assert len(frames) == len(rows) == 2
    for frame, row, outcome in zip(frames, rows, predictions, strict=True):
        given = outcome.initial_atoms()
        for atoms in (frame, row.toatoms()):
            np.testing.assert_allclose(atoms.positions, given.positions, atol=1e-7)
            np.testing.assert_array_equal(atoms.get_tags(), given.get_tags())
            np.testing.assert_array_equal(atoms.pbc, given.pbc)
            assert len(atoms.constraints) == len(given.constraints)
            assert atoms.calc is None
        assert frame.info["predicted_energy"] == pytest.approx(outcome.energy, rel=1e-7)
        assert frame.info["path"] == outcome.source
        assert row.predicted_energy == outcome.energy
        assert row.data["warnings"] if outcome.notes else "warnings" not in row.data
    assert [row.data["path"] for row in rows] == [outcome.source for outcome in predictions]


@pytest.mark.parametrize("suffix", ["csv", "jsonl", "extxyz", "db"])
def test_an_interrupt_keeps_what_is_done(predictions, tmp_path, suffix):
    """Rows are in the file before the writer is closed, those of a database once it is."""
    path = tmp_path / f"out.{suffix}"
    rows_before_closing = []

    def interrupted():
        with open_writer(path, "x") as writer:
            writer.write(predictions[0])
            writer.write(predictions[1])
            if suffix != "db":
                rows_before_closing.extend(path.read_text().splitlines())
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    if suffix == "db":
        connection = sqlite3.connect(path)
        assert connection.execute("select count(*) from systems").fetchone() == (2,)
        connection.close()
    else:
        assert path.read_text().splitlines() == rows_before_closing
        assert (
            len(rows_before_closing)
            == {"csv": 3, "jsonl": 2, "extxyz": 4 + 18 + predictions[1].n_atoms}[suffix]
        )


def test_a_database_is_committed_in_parts(predictions, tmp_path, monkeypatch):
    """After two rows they can be seen by others, although the writer is open; the third comes at the end."""
    monkeypatch.setattr("molflt.prediction.writers.DB_ROWS_PER_COMMIT", 2)
    path = tmp_path / "out.db"
    with open_writer(path, "x") as writer:
        for outcome in (predictions[0], predictions[1], predictions[0]):
            writer.write(outcome)
        assert rows_in(path) == 2
    assert rows_in(path) == 3


@pytest.mark.parametrize("suffix", ["csv", "db"])
def test_a_file_is_made_with_the_first_row_and_replaces_an_older_one(predictions, tmp_path, suffix):
    """Not before: what ends before any row leaves an older file alone."""
    path = written(tmp_path / f"out.{suffix}", [predictions[0], predictions[1]])
    older = path.read_bytes()
    with open_writer(path, "x"):
        pass
    assert path.read_bytes() == older
    written(path, predictions[:1])
    count = rows_in(path) if suffix == "db" else len(path.read_text().splitlines()) - 1
    assert count == 1


@pytest.mark.parametrize("suffix", ["csv", "jsonl", "extxyz", "db"])
def test_errors_alone_replace_an_older_file_too(predictions, tmp_path, suffix):
    """What is in the output is of the last command: no structure, and an ASE database that can be read."""
    path = written(tmp_path / f"out.{suffix}", [predictions[0], predictions[1]])
    written(path, [ERROR, ERROR])
    if suffix == "db":
        assert rows_in(path) == 0
    else:
        assert len(path.read_text().splitlines()) == {"csv": 3, "jsonl": 2, "extxyz": 0}[suffix]
    assert [item.name for item in tmp_path.iterdir()] == [path.name]


def test_a_full_disk_is_one_clear_error(predictions):
    """The device that is always full."""
    writer = CsvWriter(Path("/dev/full"), "x")
    with pytest.raises(InputError, match="cannot write /dev/full: No space left"):
        writer.write(predictions[0])
    writer.close()


@pytest.mark.parametrize("name", ["out.xlsx", "out", "out.json", "no/folder/out.csv"])
def test_an_output_that_cannot_be_written_is_refused(tmp_path, name):
    """An unknown format or a folder that is not there."""
    with pytest.raises(InputError, match=r"end its name in \.csv, .* or \.db|give a file name in a folder"):
        check_output(tmp_path / name)


def test_an_input_is_never_the_output(tmp_path, monkeypatch):
    """By whatever name."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in.db").touch()
    (tmp_path / "link.db").symlink_to("in.db")
    for name in ("in.db", "./in.db", str(tmp_path / "in.db"), "link.db"):
        with pytest.raises(InputError, match="is among the structures to predict"):
            check_output("in.db", ["x.cif", name])
    check_output("in.db", ["x.cif"])


def test_relaxed_structures_are_files_by_row(predictions, tmp_path):
    """At the predicted positions, without an energy, in a folder that was empty."""
    folder = RelaxedFolder(tmp_path / "new" / "relaxed")
    assert not (tmp_path / "new").exists(), "made with the first structure"
    paths = [folder.write(row, prediction) for row, prediction in zip((0, 7), predictions, strict=True)]
    assert [path.name[:7] for path in paths] == ["000000-", "000007-"]
    assert sorted(paths) == sorted((tmp_path / "new" / "relaxed").iterdir())
    for path, prediction in zip(paths, predictions, strict=True):
        atoms = read(path)
        np.testing.assert_allclose(atoms.positions, prediction.relaxed_atoms().positions, atol=1e-7)
        np.testing.assert_array_equal(atoms.get_tags(), prediction.initial_atoms().get_tags())
        assert np.abs(atoms.positions - prediction.initial_atoms().positions).max() > 1e-3
        assert atoms.calc is None
    with pytest.raises(InputError, match="is not empty; give --write-relaxed a new folder"):
        RelaxedFolder(tmp_path / "new")
    with pytest.raises(InputError, match="cannot make the folder"):
        RelaxedFolder(paths[0])
    with pytest.raises(InputError, match="cannot make the folder"):
        RelaxedFolder(paths[0] / "below")
