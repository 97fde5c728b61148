"""Which files the words of a command line stand for, and that nothing is read too early."""

import gzip
import io
import itertools
import os
from pathlib import Path

import ase
import pytest
from ase.build import molecule
from ase.io import write

from molflt.data.lmdb_writer import write_entries
from molflt.data.pickle_writer import dump_record
from molflt.data.structures import Structure, StructureError
from molflt.prediction import expand_paths, iter_inputs
from molflt.prediction.paths import is_structure_file
from molflt.testing import toy_record, write_toy_lmdb


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """Structure files of several kinds among others, seen from their folder."""
    monkeypatch.chdir(tmp_path)
    for folder in ("b/deep", "a", ".hidden", "empty"):
        Path(folder).mkdir(parents=True)
    water = molecule("H2O", vacuum=3.0)
    for name in ("b/deep/x.xyz", "b/1.cif", "a/z.extxyz", "a/POSCAR", ".hidden/no.xyz", "a/.no.xyz"):
        write(name, water, format="vasp" if name == "a/POSCAR" else None)
    with gzip.open("a/packed.xyz.gz", "wt") as file:
        file.write(Path("b/deep/x.xyz").read_text())
    write("b/rows.json", [water], format="json")
    Path("b/settings.json").write_text('{"epochs": 3}')
    Path("a/README.md").write_text("# Three files\n")
    Path("b/INCAR").write_text("ENCUT = 400\n")
    Path("b/cut.cif").write_text("")
    write_toy_lmdb("b/data.lmdb", 2)
    return tmp_path


def test_a_folder_stands_for_the_structure_files_below_it(tree):
    """All of them, sorted; hidden ones and others are left out, and the others are named."""
    skipped = []
    assert list(expand_paths(["b", "a"], on_skip=skipped.append)) == [
        *("b/1.cif", "b/cut.cif", "b/data.lmdb", "b/rows.json", "b/deep/x.xyz"),
        *("a/POSCAR", "a/packed.xyz.gz", "a/z.extxyz"),
    ]
    assert skipped == ["b/INCAR", "b/settings.json", "a/README.md"]


def test_patterns_are_expanded_and_sorted(tree):
    """One level, any depth, and a name with brackets that exists is itself."""
    assert list(expand_paths(["**/*.c*f", "*/deep/*"])) == ["b/1.cif", "b/cut.cif", "b/deep/x.xyz"]
    Path("a[1].xyz").write_text(Path("b/deep/x.xyz").read_text())
    assert list(expand_paths(["a[1].xyz"])) == ["a[1].xyz"]


def test_what_stands_for_nothing_is_an_error_in_its_place(tree):
    """An empty folder and a pattern without matches, between files; a missing file is left to its reader."""
    outcomes = list(expand_paths(["b/1.cif", "empty", "*.traj", "absent.xyz"]))
    assert [str(outcome) for outcome in outcomes] == [
        "b/1.cif",
        "empty: holds no structure file",
        "*.traj: matches no file; check the pattern",
        "absent.xyz",
    ]
    assert [isinstance(outcome, StructureError) for outcome in outcomes] == [False, True, True, False]


def test_a_list_is_read_from_stdin_line_by_line(tree):
    """Files and folders, names with blanks and brackets as they are; nothing beyond what was asked for."""
    Path(" b [1]*.xyz").touch()
    lines = io.StringIO(" b [1]*.xyz\n\n-\r\n \t\nb/deep\nb/*.cif")
    expected = ["first", " b [1]*.xyz", "-", "b/deep/x.xyz", "b/*.cif", "last"]
    assert list(expand_paths(["first", "-", "last"], lines)) == expected

    endless = (f"{number}.xyz\n" for number in itertools.count())
    paths = expand_paths(["-"], endless)
    assert [next(paths), next(paths)] == ["0.xyz", "1.xyz"]
    assert next(endless) == "2.xyz\n"


def test_the_output_is_no_input_of_its_folder(tree):
    """Whatever its name is spelled like, nor what is in an output folder; named itself it is an error."""
    output = Path("a", "..", "a", "z.extxyz")
    assert list(expand_paths(["a", "a/*.extxyz"], exclude=[output]))[:2] == ["a/POSCAR", "a/packed.xyz.gz"]
    assert "a/z.extxyz" not in list(expand_paths(["a"], exclude=[output]))
    [named] = expand_paths(["a/z.extxyz"], exclude=[output])
    assert str(named) == "a/z.extxyz: is the output; give another"
    found = [str(item) for item in expand_paths(["b", "b/*/*"], exclude=["b/deep"])]
    assert found == [
        *("b/1.cif", "b/cut.cif", "b/data.lmdb", "b/rows.json"),
        "b/*/*: matches no file; check the pattern",
    ]


def test_structure_files_are_known_by_content_or_name(tree):
    """A CIF without a suffix is one; text with the suffix of a format is taken for a damaged file of it."""
    os.rename("b/1.cif", "plain")
    assert is_structure_file("plain")
    Path("notes.traj").write_text("not one\n")
    assert is_structure_file("notes.traj")
    Path("notes.txt").write_text("not one\n")
    assert not is_structure_file("notes.txt")


def test_a_pipe_in_a_folder_is_not_waited_for(tree):
    """It is skipped, while a link to nowhere is left to its reader."""
    os.mkfifo("empty/p.xyz")
    os.mkfifo("empty/q.xyz.gz")
    os.symlink("nowhere", "empty/r.xyz")
    skipped = []
    assert list(expand_paths(["empty"], on_skip=skipped.append)) == ["empty/r.xyz"]
    assert skipped == ["empty/p.xyz", "empty/q.xyz.gz"]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("gaussian.log", " Entering Gaussian System, Link 0=g16\n"),
        ("pw.out", "     Program PWSCF v.6.0 starts\n"),
        ("geometry.in", "lattice_vector 4 0 0\natom 0 0 0 Cu\n"),
        pytest.param(
            "input.data",
            "begin\natom 0.0 0.0 0.0 Cu 0.0 0.0 0.0 0.0 0.0\nend\n",
            marks=pytest.mark.skipif(ase.__version__ < "3.29", reason="ASE 3.28 does not tell it by content"),
        ),
    ],
)
def test_a_name_that_programs_share_is_not_enough(tmp_path, name, content):
    """A log of anything is skipped in a folder, one of a known program is read."""
    path = tmp_path / name
    path.write_text(content)
    assert is_structure_file(str(path))
    path.write_text("step 1 of 3\n")
    assert not is_structure_file(str(path))


def test_records_of_an_lmdb_are_structures_with_their_ids(tree, tmp_path):
    """Source and frame of the file, sid of the record; a bad record is an error and the rest go on."""
    records = [toy_record(seed) for seed in range(3)]
    records[1]["pos"][0] = records[1]["pos"][1]
    path = str(tmp_path / "own.lmdb")
    write_entries(path, (dump_record(record, "pyg1") for record in records), True)
    first, bad, last = iter_inputs([path])
    assert isinstance(first, Structure)
    assert isinstance(last, Structure)
    assert [(item.source, item.frame, int(item.data.sid)) for item in (first, last)] == [
        (path, 0, 1000),
        (path, 2, 1002),
    ]
    assert isinstance(bad, StructureError)
    assert (bad.source, bad.frame) == (path, 1)
    assert "sid 1001" in bad.reason
    [refused] = iter_inputs([str(tmp_path / "absent.lmdb")])
    assert isinstance(refused, StructureError)


def test_errors_pass_and_files_are_opened_one_after_the_other(tree):
    """A stream of two frames, an error, and a file that must not be missed before its turn."""
    error = StructureError("empty", None, "holds no structure file")
    write("two.xyz", [molecule("H2O"), molecule("CH4")])
    outcomes = iter_inputs(["two.xyz", error, "later.xyz"])
    assert [next(outcomes).formula, next(outcomes).formula] == ["H2O", "CH4"]
    assert next(outcomes) is error
    write("later.xyz", molecule("C6H6"))
    assert [outcome.formula for outcome in outcomes] == ["C6H6"]
