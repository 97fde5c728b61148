"""Predictions as they come, one by one, into a file: CSV, JSON lines, extended XYZ or an ASE database.

What has been written stays readable whatever happens next: an interrupt loses no finished row.
"""

from __future__ import annotations

import csv
import json
import os
import sqlite3
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from molflt.errors import InputError
from molflt.prediction.outcome import Prediction

OUTPUT_COLUMNS: tuple[str, ...] = (
    "path",
    "frame",
    "id",
    "formula",
    "n_atoms",
    "energy",
    "energy_meaning",
    "uncertainty",
    "uncertainty_kind",
    "unlike_training",
    "tag_source",
    "pbc",
    "warnings",
    "error",
)
"""Energies and uncertainties are in eV."""
DB_ROWS_PER_COMMIT = 100


def output_row(outcome: Prediction | InputError, energy_meaning: str) -> dict[str, Any]:
    """The values of `OUTPUT_COLUMNS`: numbers, strings, a list of warnings; None for what is not known."""
    if isinstance(outcome, InputError):
        where = {"path": getattr(outcome, "source", None), "frame": getattr(outcome, "frame", None)}
        return dict.fromkeys(OUTPUT_COLUMNS) | where | {"warnings": [], "error": str(outcome)}
    return {
        "path": outcome.source,
        "frame": outcome.frame,
        "id": outcome.id,
        "formula": outcome.formula,
        "n_atoms": outcome.n_atoms,
        "energy": outcome.energy,
        "energy_meaning": energy_meaning,
        "uncertainty": outcome.uncertainty,
        "uncertainty_kind": outcome.uncertainty_kind,
        "unlike_training": outcome.unlike_training,
        "tag_source": outcome.tag_source,
        "pbc": outcome.pbc,
        "warnings": list(outcome.notes),
        "error": None,
    }


class Writer:
    """Takes outcomes in order. The file is made with the first one, and replaces what had its name."""

    def __init__(self, path: Path, energy_meaning: str) -> None:
        self.path = path
        self.energy_meaning = energy_meaning

    def write(self, outcome: Prediction | InputError) -> None:
        """Add an outcome; `InputError` where the disk refuses."""
        try:
            self.add(outcome)
        except (OSError, sqlite3.Error) as error:
            reason = getattr(error, "strerror", None) or error
            raise InputError(
                f"cannot write {self.path}: {reason}; make room or give another --output"
            ) from error

    def add(self, outcome: Prediction | InputError) -> None:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Writer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class TextWriter(Writer):
    """A text file that grows by whole rows."""

    def __init__(self, path: Path, energy_meaning: str) -> None:
        super().__init__(path, energy_meaning)
        self._file: Any = None

    def add(self, outcome: Prediction | InputError) -> None:
        if self._file is None:
            self._file = self.path.open("w", encoding="utf-8", errors="surrogateescape", newline="")
            self.start()
        self.add_row(outcome)
        self._file.flush()

    def start(self) -> None:
        """Write what stands above the rows."""

    def add_row(self, outcome: Prediction | InputError) -> None:
        raise NotImplementedError

    def close(self) -> None:
        if self._file is not None:
            # What a failed write left in the buffer fails once more; it has been reported.
            with suppress(OSError):
                self._file.close()


class CsvWriter(TextWriter):
    """A header and a row per outcome; warnings are joined by semicolons."""

    def start(self) -> None:
        csv.writer(self._file, lineterminator="\n").writerow(OUTPUT_COLUMNS)

    def add_row(self, outcome: Prediction | InputError) -> None:
        row = output_row(outcome, self.energy_meaning)
        row["warnings"] = "; ".join(row["warnings"])
        csv.writer(self._file, lineterminator="\n").writerow([row[column] for column in OUTPUT_COLUMNS])


class JsonLinesWriter(TextWriter):
    """A JSON object per line and outcome."""

    def add_row(self, outcome: Prediction | InputError) -> None:
        self._file.write(json.dumps(output_row(outcome, self.energy_meaning)) + "\n")


class XyzWriter(TextWriter):
    """The structures as given, the row in each one's comment line; failed ones are left out."""

    def add_row(self, outcome: Prediction | InputError) -> None:
        if isinstance(outcome, InputError):
            return
        from ase.io.extxyz import write_xyz

        atoms = outcome.initial_atoms()
        atoms.info = {
            name: " ".join(value.split()) if isinstance(value, str) else value
            for name, value in structure_values(outcome, self.energy_meaning).items()
        }
        write_xyz(self._file, [atoms])


class DatabaseWriter(Writer):
    """An ASE database (SQLite) of the structures as given; failed ones are left out.

    `predicted_energy`, `uncertainty`, `unlike_training`, `frame` and `tag_source` are key-value pairs, to be
    searched for; the whole row is in `data`.
    """

    def __init__(self, path: Path, energy_meaning: str) -> None:
        super().__init__(path, energy_meaning)
        self._database: Any = None
        self._pending = 0

    def add(self, outcome: Prediction | InputError) -> None:
        if self._database is None:
            from ase.db import connect

            self._database = connect(str(self.path), type="db", append=False)
            self._database.count()  # makes the file, which may stay without rows
        if isinstance(outcome, InputError):
            return
        if not self._pending:
            self._database.__enter__()
        values = structure_values(outcome, self.energy_meaning)
        searchable = ("predicted_energy", "uncertainty", "unlike_training", "frame", "tag_source")
        pairs = {name: values[name] for name in searchable if name in values}
        self._database.write(outcome.initial_atoms(), key_value_pairs=pairs, data=values)
        self._pending += 1
        if self._pending == DB_ROWS_PER_COMMIT:
            self.close()

    def close(self) -> None:
        if self._pending:
            self._pending = 0
            # ASE leaves its connection open where the commit fails.
            with closing(self._database.connection):
                self._database.__exit__(None, None, None)


def structure_values(prediction: Prediction, energy_meaning: str) -> dict[str, Any]:
    """What a file of structures says beside them: the row, less what the structure itself shows.

    The energy is called `predicted_energy`, as it is not that of these positions.
    """
    row = output_row(prediction, energy_meaning)
    own = ("formula", "n_atoms", "pbc", "error")
    values = {"predicted_energy": row.pop("energy"), **row, "warnings": "; ".join(row["warnings"])}
    return {name: value for name, value in values.items() if name not in own and value not in (None, "")}


_WRITERS: Mapping[str, Callable[[Path, str], Writer]] = {
    ".csv": CsvWriter,
    ".jsonl": JsonLinesWriter,
    ".extxyz": XyzWriter,
    ".db": DatabaseWriter,
}


def check_output(path: str | os.PathLike[str], inputs: Iterable[str] = ()) -> None:
    """Raise `InputError` unless predictions can be written to `path`, which must not be one of `inputs`."""
    target = Path(path)
    if target.suffix not in _WRITERS:
        known = ", ".join(list(_WRITERS)[:-1])
        raise InputError(f"cannot tell the format of {path}; end its name in {known} or {list(_WRITERS)[-1]}")
    if target.is_dir() or not target.parent.is_dir():
        raise InputError(f"cannot write {path}; give a file name in a folder that exists")
    for name in inputs:
        if os.path.realpath(name) == os.path.realpath(target):
            raise InputError(f"{path} is among the structures to predict; give another --output")


def open_writer(path: str | os.PathLike[str], energy_meaning: str) -> Writer:
    """What writes predictions to `path` in the format of its suffix; `InputError` as in `check_output`.

    Use it in a `with` block, which leaves all rows in the file however it ends.
    """
    check_output(path)
    return _WRITERS[Path(path).suffix](Path(path), energy_meaning)
