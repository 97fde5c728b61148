"""Damaged ASE databases end in an error and never in a crash; reading leaves no trace."""

import os
import random
import zlib

import ase.db
import lmdb
import pytest
from ase.build import molecule

from molflt.data import ase_databases
from molflt.data.ase_databases import database_kind, iter_database
from molflt.data.convert import convert
from molflt.data.structures import read_structures
from molflt.errors import InputError
from molflt.testing import write_toy_lmdb


@pytest.fixture
def aselmdb(tmp_path):
    write_toy_lmdb(tmp_path / "a.lmdb", 5)
    convert(tmp_path / "a.lmdb", tmp_path / "x.aselmdb")
    (tmp_path / "a.lmdb").unlink()
    return tmp_path / "x.aselmdb"


def test_an_aselmdb_on_read_only_media_is_read_and_gets_no_lock_file(tmp_path, aselmdb):
    before = aselmdb.read_bytes()
    os.chmod(aselmdb, 0o444)
    os.chmod(tmp_path, 0o555)
    try:
        assert len(list(iter_database(aselmdb, "aselmdb"))) == 5
    finally:
        os.chmod(tmp_path, 0o755)
    assert os.listdir(tmp_path) == ["x.aselmdb"]
    assert aselmdb.read_bytes() == before


def test_the_kind_of_a_database_is_told_by_content(tmp_path, aselmdb):
    os.rename(aselmdb, tmp_path / "odd.lmdb")
    assert database_kind(tmp_path / "odd.lmdb", b"") == "aselmdb"
    for kind in ("db", "json"):
        with ase.db.connect(tmp_path / f"y.{kind}", type=kind) as database:
            database.write(molecule("CO"))
        head = (tmp_path / f"y.{kind}").read_bytes()[:4096]
        assert database_kind(tmp_path / f"y.{kind}", head) == kind
    assert database_kind(write_toy_lmdb(tmp_path / "z.lmdb", 1), b"") is None
    assert database_kind(tmp_path / "config.json", b'{"radius": 6.0}') is None


def test_deleted_rows_stay_deleted(tmp_path, aselmdb):
    with ase.db.connect(aselmdb) as database:
        database.delete([2, 5])
    assert [atoms.info["sid"] for atoms in iter_database(aselmdb, "aselmdb")] == [1000, 1002, 1003]


@pytest.mark.parametrize("kind", ["aselmdb", "db"])
def test_flipped_and_cut_databases_end_in_atoms_or_an_input_error(tmp_path, aselmdb, kind):
    rng = random.Random(kind)
    path = tmp_path / f"y.{kind}"
    if kind == "db":
        convert(aselmdb, path)
        content = path.read_bytes()
    else:
        content = aselmdb.read_bytes()
    messages = []
    for _ in range(60):
        changed = bytearray(content)
        for _ in range(rng.randint(1, 8)):
            changed[rng.randrange(len(changed))] = rng.randrange(256)
        path.write_bytes(changed[: rng.randrange(len(changed))] if rng.random() < 0.3 else changed)
        try:
            list(iter_database(path, kind))
        except InputError as error:
            messages.append(str(error))
    assert len(messages) > 10
    assert all(message.isprintable() for message in messages)


def test_a_row_that_unpacks_to_more_than_the_limit_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(ase_databases, "_MAX_ROW_BYTES", 1 << 20)
    with (
        lmdb.open(str(tmp_path / "x.aselmdb"), subdir=False, lock=False) as environment,
        environment.begin(write=True) as transaction,
    ):
        transaction.put(b"nextid", zlib.compress(b"2"))
        transaction.put(b"1", zlib.compress(b" " * (1 << 21)))
    with pytest.raises(InputError, match=r"row 0 .* larger than"):
        list(iter_database(tmp_path / "x.aselmdb", "aselmdb"))


def test_writing_aselmdb_without_its_package_says_what_to_install(tmp_path, monkeypatch):
    def without(*args, **kwargs):
        raise ModuleNotFoundError("No module named 'ase_db_backends'")

    monkeypatch.setattr(ase.db, "connect", without)
    write_toy_lmdb(tmp_path / "a.lmdb", 1)
    with pytest.raises(InputError, match=r"pip install 'molflt\[aselmdb\]'"):
        convert(tmp_path / "a.lmdb", tmp_path / "x.aselmdb")
    assert os.listdir(tmp_path) == ["a.lmdb"]


def test_structures_of_an_aselmdb_are_read_without_a_lock_file(tmp_path, aselmdb):
    structures = read_structures(aselmdb)
    assert [structure.frame for structure in structures] == list(range(5))
    assert {structure.reader for structure in structures} == {"ASE (aselmdb)"}
    assert os.listdir(tmp_path) == ["x.aselmdb"]


def test_a_cut_aselmdb_is_refused_as_a_structure_file(aselmdb):
    aselmdb.write_bytes(aselmdb.read_bytes()[: aselmdb.stat().st_size // 2])
    with pytest.raises(InputError, match=r"x\.aselmdb"):
        read_structures(aselmdb)
