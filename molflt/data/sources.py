"""Reads a data set of any kind as a stream of records: LMDB, ASE database, structure files, or a folder.

What is refused comes in its place in the stream, as an `InputError`, and the reader decides what that means.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from molflt.data.ase_databases import database_kind, is_aselmdb, iter_database
from molflt.data.ase_records import record_from_atoms
from molflt.data.copying import copied_record
from molflt.data.lmdb import RecordReader
from molflt.data.lmdb_pages import PageError, PageFile
from molflt.data.records import normalize_record
from molflt.data.structure_formats import Frame, iter_frames
from molflt.data.structures import StructureError
from molflt.errors import InputError

_HEAD_BYTES = 4096


class SourceRecord(NamedTuple):
    """One record of a source."""

    record: dict[str, Any] | bytes
    """Its fields, or its pickle where it is to be copied."""
    fields: list[str]
    """Names of its settled fields."""
    tag_source: str | None = None
    """Where its tags come from; None for records of an LMDB, which carry OC20's or none."""
    left_out: tuple[str, ...] = ()
    """What the source has and a record does not hold."""
    notes: tuple[str, ...] = ()
    """Interpretations and oddities, but for tags and energies, which the other fields tell."""


def iter_source(
    source: Path, copy: bool = False, total_energy_as_label: bool = False
) -> Iterator[SourceRecord | InputError]:
    """Yield the records of a source in order.

    Args:
        source: an LMDB (file or folder of shards), an ASE database, a structure file of any kind, or a folder
            of such files, which are read in sorted order.
        copy: give the records of an LMDB as they are stored.
        total_energy_as_label: see `ase_records.record_from_atoms`.

    Raises:
        InputError: there is nothing to read.
    """
    if not is_lmdb(source):
        yield from _atoms_records(source, total_energy_as_label)
        return
    if total_energy_as_label:
        raise InputError(f"{source} is an LMDB, which holds no total energies; leave that option out")
    yield from _lmdb_records(source, copy)


def is_lmdb(source: Path) -> bool:
    """Whether a file or folder is an OC20-format LMDB, damaged or not."""
    if source.is_dir():
        return (source / "data.mdb").is_file() or any(entry.suffix == ".lmdb" for entry in source.iterdir())
    if source.suffix == ".lmdb":
        return True
    try:
        PageFile(source).close()
    except (OSError, PageError):
        return False
    return not is_aselmdb(source)


def _lmdb_records(source: Path, copy: bool) -> Iterator[SourceRecord | InputError]:
    reader = RecordReader(source)
    for index in range(len(reader)):
        try:
            if copy:
                record, settled = copied_record(reader, index)
            else:
                fields, name = reader.read(index)
                settled = normalize_record(fields, name, default_sid=index)
                record = {**fields, "sid": int(settled.sid)}
        except InputError as error:
            yield error
            continue
        yield SourceRecord(record, list(settled.keys()))


def _atoms_records(source: Path, total_energy_as_label: bool) -> Iterator[SourceRecord | InputError]:
    sid = 0
    for file in _files(source):
        frames = _frames(file)
        for frame in itertools.count():
            try:
                item = next(frames, None)
            except InputError as error:
                yield StructureError(str(file), frame or None, str(error))
                break
            if item is None:
                break
            if isinstance(item, InputError):
                yield StructureError(str(file), frame, str(item))
                continue
            try:
                form = record_from_atoms(item.atoms, str(file), frame, sid, total_energy_as_label)
            except StructureError as error:
                yield error
                continue
            sid += 1
            notes = (*item.notes, *form.notes)
            yield SourceRecord(form.record, list(form.record), form.tag_source, tuple(form.left_out), notes)


def _frames(file: Path) -> Iterator[Frame | InputError]:
    with open(file, "rb") as stream:
        kind = database_kind(file, stream.read(_HEAD_BYTES))
    if kind is not None:
        for atoms in iter_database(file, kind):
            yield Frame(atoms, f"ASE ({kind})", [])
        return
    yield from iter_frames(file)


def _files(source: Path) -> list[Path]:
    if not source.exists():
        raise InputError(
            f"{source} does not exist; give an LMDB, an ASE database, a structure file or a folder"
        )
    if not source.is_dir():
        return [source]
    entries = sorted(entry for entry in source.iterdir() if not entry.name.startswith("."))
    files = [entry for entry in entries if entry.is_file() and not entry.name.endswith("-lock")]
    if not files:
        raise InputError(f"{source} holds no files; give a folder of structure files or of .lmdb shards")
    return files
