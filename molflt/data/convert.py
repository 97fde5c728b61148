"""Converts data sets between OC20-format LMDB, extended XYZ and ASE databases.

Every source becomes a stream of records and every destination is written from one, so each pair of formats
keeps the same fields (see `ase_records`); LMDB to LMDB copies records as they are. The destination appears
whole or not at all, and what it cannot hold is in the report.
"""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ase import Atoms

from molflt.data.ase_databases import write_database
from molflt.data.ase_records import RECOMPUTABLE, atoms_from_record
from molflt.data.lmdb_writer import write_entries
from molflt.data.pickle_writer import dump_record
from molflt.data.sources import iter_source
from molflt.data.whole import PARTIAL, check_destination, whole_file, whole_folder
from molflt.data.xyz_writer import write_xyz_frame
from molflt.errors import InputError

_SHOWN_NOTES = 20
Record = dict[str, Any] | bytes
"""Fields, or the pickle of a record that is copied as it is."""
Writer = Callable[[Path, Iterator[Record], "ConversionReport"], None]


@dataclass
class ConversionReport:
    """What a conversion did."""

    records: int = 0
    """Structures written."""
    files: list[Path] = field(default_factory=list)
    """Files written."""
    fields: Counter[str] = field(default_factory=Counter)
    """Field to the number of written records that have it."""
    tag_sources: Counter[str] = field(default_factory=Counter)
    """Where tags come from (`molflt.data.structures.Structure.tag_source`), for sources other than LMDBs."""
    left_out: Counter[str] = field(default_factory=Counter)
    """What the destination does not hold, to the number of structures that had it."""
    notes: Counter[str] = field(default_factory=Counter)
    """Interpretations and oddities of the source's structures, to the number of structures."""
    refused: list[str] = field(default_factory=list)
    """Why each structure that was skipped was refused."""

    def lines(self) -> list[str]:
        """The report for a terminal."""
        size = "1 file" if len(self.files) == 1 else f"{len(self.files)} files"
        lines = [f"{self.records} structures written to {size}"]
        if self.tag_sources:
            kinds = ", ".join(f"{kind} {count}" for kind, count in self.tag_sources.most_common())
            lines.append(f"tags: {kinds}")
        partly = [
            f"{name} ({count} of {self.records})"
            for name, count in self.fields.items()
            if count < self.records
        ]
        if partly:
            lines.append(f"in some structures only: {', '.join(partly)}; to train, make a set for each kind")
        recomputable = [name for name in self.left_out if name in RECOMPUTABLE]
        if recomputable:
            lines.append(f"not carried, as they follow from the other fields: {', '.join(recomputable)}")
        for name, count in self.left_out.items():
            if name not in RECOMPUTABLE:
                hint = "; it is a total energy: --total-energy-as-label takes it as y_relaxed"
                hint = hint if name == "calculator's energy" else ""
                lines.append(f"not carried: {name} ({count} structures){hint}")
        notes = self.notes.most_common()
        lines += [f"note: {note} ({count} structures)" for note, count in notes[:_SHOWN_NOTES]]
        if len(notes) > _SHOWN_NOTES:
            lines.append(f"and {len(notes) - _SHOWN_NOTES} other notes")
        return [*lines, *(f"skipped: {reason}" for reason in self.refused)]


def convert(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    *,
    output_format: str | None = None,
    shard_size: int | None = None,
    overwrite: bool = False,
    skip_refused: bool = False,
    total_energy_as_label: bool = False,
    progress: bool = False,
) -> ConversionReport:
    """Convert a data set.

    Args:
        source: an LMDB (file or folder of shards), an ASE database (`.db`, `.json`, `.aselmdb`), a structure
            file of any kind, or a folder of such files, which are read in sorted order.
        destination: a file ending in .lmdb, .extxyz, .xyz, .db or .aselmdb, else a folder of shards
            `data.0000.lmdb`, `data.0001.lmdb`, ...
        output_format: what a folder's shards are: `lmdb`, `extxyz`, `db` or `aselmdb`; None means lmdb.
        shard_size: structures per shard; None puts all in one.
        overwrite: replace what is at `destination` once the new data are whole.
        skip_refused: leave structures that are refused out, each listed in the report, and go on.
        total_energy_as_label: see `record_from_atoms`.
        progress: show a progress bar on stderr.

    Returns:
        What was written, and what was not.

    Raises:
        InputError: nothing readable, a structure that is refused, or a destination that is taken or cannot
            be written; nothing is written then.
    """
    source, destination = Path(source), Path(destination)
    write, suffix, is_file = _writer(destination, output_format)
    if shard_size is not None and (is_file or shard_size < 1):
        raise InputError(
            f"{destination} is one file; give the name of a folder for shards"
            if is_file
            else f"a shard holds at least one structure, got {shard_size}"
        )
    check_destination(destination, overwrite)
    if destination.exists() and source.exists() and destination.resolve() == source.resolve():
        raise InputError(f"{source} is both source and destination; give another destination")
    report = ConversionReport()
    records = _tracked(
        _records(source, suffix == "lmdb", report, skip_refused, total_energy_as_label), progress
    )
    first = next(records, None)
    if first is None:
        raise InputError(f"{source} holds no structures to convert; give another source")
    records = itertools.chain([first], records)
    if is_file:
        with whole_file(destination) as path:
            write(path, records, report)
        report.files = [destination]
    else:
        with whole_folder(destination) as folder:
            for number, shard in enumerate(_shards(records, shard_size)):
                name = f"data.{number:04d}.{suffix}"
                write(folder / f"{name}{PARTIAL}", shard, report)
                report.files.append(destination / name)
    return report


def _writer(destination: Path, output_format: str | None) -> tuple[Writer, str, bool]:
    """The function that writes the destination's format, the format's suffix, and whether it is one file."""
    formats: dict[str, Writer] = {
        "lmdb": _write_lmdb,
        "extxyz": _write_extxyz,
        "xyz": _write_extxyz,
        "db": _write_database("db"),
        "aselmdb": _write_database("aselmdb"),
    }
    suffix = destination.suffix.removeprefix(".").lower()
    is_file = suffix in formats
    chosen = output_format or (suffix if is_file else "lmdb")
    is_other = bool(suffix) and not is_file and output_format is None
    if chosen not in formats or is_other or (is_file and chosen != suffix):
        chosen = suffix if is_other else chosen
        raise InputError(
            f"{destination} cannot be written as {chosen!r}; end it in .lmdb, .extxyz, .db or .aselmdb, "
            "or give a folder and --format"
        )
    return formats[chosen], chosen, is_file


def _write_lmdb(path: Path, records: Iterator[Record], report: ConversionReport) -> None:
    def values() -> Iterator[bytes]:
        for record in records:
            report.records += 1
            yield record if isinstance(record, bytes) else dump_record(record)

    write_entries(path, values())


def _write_extxyz(path: Path, records: Iterator[Record], report: ConversionReport) -> None:
    with open(path, "w", encoding="utf-8", newline="\n") as stream:
        for atoms in _as_atoms(records, report):
            write_xyz_frame(stream, atoms)


def _write_database(kind: str) -> Writer:
    return lambda path, records, report: write_database(path, kind, _as_atoms(records, report))


def _as_atoms(records: Iterator[Record], report: ConversionReport) -> Iterator[Atoms]:
    for record in records:
        assert not isinstance(record, bytes)
        form = atoms_from_record(record)
        report.records += 1
        report.left_out.update(form.left_out)
        yield form.atoms


def _records(
    source: Path, copy: bool, report: ConversionReport, skip_refused: bool, total_energy_as_label: bool
) -> Iterator[Record]:
    for item in iter_source(source, copy, total_energy_as_label):
        if not isinstance(item, InputError):
            report.fields.update(item.fields)
            report.left_out.update(item.left_out)
            report.notes.update(item.notes)
            if item.tag_source is not None:
                report.tag_sources[item.tag_source] += 1
            yield item.record
        elif skip_refused:
            report.refused.append(str(item))
        else:
            raise item


def _shards(records: Iterator[Record], size: int | None) -> Iterator[Iterator[Record]]:
    """Runs of `size` records; each must be used up before the next."""
    if size is None:
        yield records
        return
    for first in records:
        yield itertools.chain([first], itertools.islice(records, size - 1))


def _tracked(records: Iterator[Record], progress: bool) -> Iterator[Record]:
    if not progress:
        return records
    from rich.console import Console
    from rich.progress import track

    return iter(track(records, description="Converting", console=Console(stderr=True)))
