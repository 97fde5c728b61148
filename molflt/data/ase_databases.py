"""ASE databases: SQLite (`.db`), JSON (`.json`) and LMDB (`.aselmdb`, from the package ase-db-backends).

An `.aselmdb` is read by molflt's own page reader and not by the `lmdb` package, which a damaged file can
crash, and which wants to write a lock file beside what it reads. Keys are `1`, `2`, ..., values
zlib-compressed JSON of ASE's database row, beside `nextid`, `deleted_ids` and `metadata`
(ase_db_backends/aselmdb.py). Writing one goes through ase-db-backends.

Single numbers and texts of `Atoms.info` are a row's key-value pairs, arrays beyond ASE's own its data.
"""

from __future__ import annotations

import os
import re
import sqlite3
import zlib
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
from ase import Atoms
from ase.calculators.calculator import all_properties
from ase.db.row import AtomsRow

from molflt.data.lmdb_pages import PageError, PageFile
from molflt.errors import InputError

MARK = "molflt"
"""Entry of `Atoms.info`, and of a row's data, in which `ase_records` keeps what ASE has no place for."""
_MAX_ROW_BYTES = 1 << 28
_OWN_ARRAYS = frozenset({"numbers", "positions", "tags"})
_RESERVED = frozenset({b"nextid", b"deleted_ids", b"metadata"})
_SQLITE_MAGIC = b"SQLite format 3\x00"


def is_aselmdb(path: Path) -> bool:
    """Whether a file is an LMDB with ASE's keys."""
    try:
        pages = PageFile(path)
        try:
            return pages.get(b"nextid") is not None
        finally:
            pages.close()
    except (OSError, PageError):
        return False


def database_kind(path: Path, head: bytes) -> str | None:
    """`db`, `json` or `aselmdb` by a file's first bytes, or None for what is no ASE database.

    JSON files count when their name ends in `.json` and they show a row's `"numbers"` or the list of `"ids"`.
    A file by the name of `.aselmdb` is one, damaged or not, so that nothing else opens it.
    """
    if head.startswith(_SQLITE_MAGIC):
        return "db"
    if path.suffix == ".aselmdb" or is_aselmdb(path):
        return "aselmdb"
    is_json = path.suffix == ".json" and head.lstrip()[:1] == b"{"
    return "json" if is_json and re.search(rb'"(numbers|ids)"\s*:', head) else None


def iter_database(path: Path, kind: str) -> Iterator[Atoms]:
    """Yield the rows of a database as atoms; key-value pairs and data are in `info` and `arrays`.

    Raises:
        InputError: the file is damaged or a row cannot be read, which ends the reading.
    """
    count = 0
    try:
        for row in _aselmdb_rows(path) if kind == "aselmdb" else _rows(path, kind):
            yield _atoms(row)
            count += 1
    except InputError:
        raise
    except Exception as error:  # ASE's reader raises whatever a damaged row leads to
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise InputError(
            f"row {count} (from 0) of the ASE database cannot be read ({reason}); take the file from its "
            "source again"
        ) from error


def write_database(path: Path, kind: str, structures: Iterable[Atoms]) -> None:
    """Write atoms as the rows of a new database.

    Args:
        path: the file to make; nothing may be there.
        kind: `db` or `aselmdb`.
        structures: as `ase_records.atoms_from_record` makes them; consumed one by one.

    Raises:
        InputError: ase-db-backends is needed and not installed.
    """
    import ase.db

    try:
        database: Any = ase.db.connect(path, type=kind, use_lock_file=False)
    except ModuleNotFoundError:
        raise InputError(
            "writing .aselmdb needs the package ase-db-backends; pip install 'molflt[aselmdb]'"
        ) from None
    try:
        with opened(database):
            for atoms in structures:
                pairs = {name: value for name, value in atoms.info.items() if name != MARK}
                data = {name: values for name, values in atoms.arrays.items() if name not in _OWN_ARRAYS}
                database.write(atoms, key_value_pairs=pairs, data={MARK: atoms.info[MARK], **data})
                if kind == "aselmdb":
                    # The backend looks through this list at every row, although the next id is in the file.
                    database.ids.clear()
    except (sqlite3.Error, lmdb.Error) as error:
        raise InputError(f"the ASE database cannot be written: {error}; choose a place with room") from error
    if kind == "aselmdb":
        Path(f"{os.fspath(path)}-lock").unlink(missing_ok=True)


def _rows(path: Path, kind: str) -> Iterator[AtomsRow]:
    import ase.db

    database: Any = ase.db.connect(path, type=kind, use_lock_file=False, serial=True)
    with opened(database):
        yield from database.select()


@contextmanager
def opened(database: Any) -> Iterator[Any]:
    """An ASE database open for the block, and closed after it even where its last commit fails."""
    with ExitStack() as stack:
        database.__enter__()
        # SQLite's connection, which ASE leaves open where a commit or a rollback raises.
        if (connection := getattr(database, "connection", None)) is not None:
            stack.callback(connection.close)
        stack.push(database.__exit__)
        yield database


def _aselmdb_rows(path: Path) -> Iterator[AtomsRow]:
    try:
        pages = PageFile(path)
        deleted = {int(number) for number in _decoded(pages.get(b"deleted_ids") or zlib.compress(b"[]"))}
        numbers = sorted(int(key) for key in pages if key not in _RESERVED and key.isdigit())
        for number in numbers:
            value = pages.get(b"%d" % number)
            if number in deleted or value is None:
                continue
            fields = _decoded(value)
            for name in all_properties:
                if isinstance(fields.get(name), list):
                    fields[name] = np.array(fields[name])
            yield AtomsRow(fields)
    except PageError as error:
        raise InputError(f"the LMDB is {error}; take the file from its source again") from None


def _decoded(value: bytes) -> Any:
    from ase.io.jsonio import decode

    machine = zlib.decompressobj()
    text = machine.decompress(value, _MAX_ROW_BYTES)
    if machine.unconsumed_tail or not machine.eof:
        raise ValueError("a row that is cut short, or larger than 256 MiB")
    return decode(text.decode())


def _atoms(row: AtomsRow) -> Atoms:
    atoms = row.toatoms()
    atoms.info.update(row.key_value_pairs)
    for name, value in row.data.items():
        value = np.asarray(value) if isinstance(value, list) else value
        if isinstance(value, np.ndarray) and value.shape[:1] == (len(atoms),) and name not in atoms.arrays:
            atoms.set_array(name, value)
        else:
            atoms.info[name] = value
    return atoms
