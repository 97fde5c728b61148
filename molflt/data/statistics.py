"""Mean and spread of a data set's targets, Δpos, sizes and elements, in one pass over its records.

For each quantity number, mean and sum of squared deviations are updated block by block (Chan, Golub and
LeVeque, The American Statistician 37, 242 (1983)), in float64, so nothing is held and nothing cancels. Each
LMDB file's numbers are kept beside it in `<name>.stats.json` with a fingerprint of the file's content; they
are taken again when the content has changed or the file is the newer one of the two, and each time where the
folder cannot be written.
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from molflt.data.cells import check_cell
from molflt.data.fields import StructureData
from molflt.data.lmdb import RecordFile, RecordReader
from molflt.data.pickles import load_record
from molflt.data.records import normalize_record
from molflt.data.sizes import content_fingerprint
from molflt.data.transforms import DeltaPos, cell_and_pbc
from molflt.errors import InputError
from molflt.replacing import replacing
from molflt.terminal import tracked

if TYPE_CHECKING:
    from rich.table import Table

VERSION = 2
_LABELS = ("y_relaxed", "y_init")
_UNITS = {"y_relaxed": " (eV)", "y_init": " (eV)", "delta_pos": " (Å, components of free atoms)"}


@dataclass
class Moments:
    """Number, mean, sum of squared deviations from it, and range of values seen so far."""

    n: int = 0
    mean: float = 0.0
    squares: float = 0.0
    min: float = math.inf
    max: float = -math.inf

    @property
    def std(self) -> float:
        """Standard deviation over the values themselves (divided by n); NaN without values."""
        return math.sqrt(self.squares / self.n) if self.n else math.nan

    @property
    def rms(self) -> float:
        """Root mean square; NaN without values."""
        return math.sqrt(self.squares / self.n + self.mean**2) if self.n else math.nan

    def add(self, values: ArrayLike) -> None:
        """Take in values of any shape."""
        array = np.asarray(values, dtype=np.float64)
        if array.size:
            mean = float(array.mean())
            squares = float(np.square(array - mean).sum())
            self.merge(Moments(array.size, mean, squares, float(array.min()), float(array.max())))

    def merge(self, other: Moments) -> None:
        """Take in what another has seen."""
        total = self.n + other.n
        if other.n:
            step = other.mean - self.mean
            self.mean += step * other.n / total
            self.squares += other.squares + step * step * self.n * other.n / total
            self.n = total
            self.min, self.max = min(self.min, other.min), max(self.max, other.max)


@dataclass
class DataStatistics:
    """Statistics of a file or data set."""

    moments: dict[str, Moments] = field(default_factory=dict)
    """Of `y_relaxed` and `y_init` (eV), `delta_pos` (Å; components over free atoms), `atoms` and `edges`;
    what no record has is absent."""
    element_atoms: Counter[str] = field(default_factory=Counter)
    """Element symbol to number of atoms."""
    element_systems: Counter[str] = field(default_factory=Counter)
    """Element symbol to number of systems that contain it."""
    field_systems: Counter[str] = field(default_factory=Counter)
    """Field name to number of systems that have it."""
    read: int = 0
    """Systems that were read for this; the numbers of the others were kept."""

    @property
    def records(self) -> int:
        """Number of systems."""
        return self.moments["atoms"].n if "atoms" in self.moments else 0

    def add(self, data: StructureData) -> None:
        """Take in one system; atoms count as free where `fixed` is absent."""
        from ase.data import chemical_symbols

        for label in _LABELS:
            if label in data:
                self._moments(label).add(data[label].numpy())
        if "pos_relaxed" in data:
            delta_pos = DeltaPos()(data)["delta_pos"]
            free = delta_pos[~data.fixed] if "fixed" in data else delta_pos
            self._moments("delta_pos").add(free.numpy())
        else:
            check_cell(*(values.numpy() for values in cell_and_pbc(data)))
        self._moments("atoms").add(int(data.natoms))
        if "edge_index" in data:
            self._moments("edges").add(data["edge_index"].shape[1])
        symbols = [chemical_symbols[number] for number in data.atomic_numbers.tolist()]
        self.element_atoms.update(symbols)
        self.element_systems.update(set(symbols))
        self.field_systems.update(data.keys())
        self.read += 1

    def merge(self, other: DataStatistics) -> None:
        """Take in another file's."""
        for name, moments in other.moments.items():
            self._moments(name).merge(moments)
        self.element_atoms.update(other.element_atoms)
        self.element_systems.update(other.element_systems)
        self.field_systems.update(other.field_systems)
        self.read += other.read

    def to_dict(self) -> dict[str, Any]:
        """For JSON: records; per quantity n, mean, std, rms, min, max; per element atoms and systems."""
        from ase.data import atomic_numbers

        quantities = {
            name: {key: getattr(moments, key) for key in ("n", "mean", "std", "rms", "min", "max")}
            for name, moments in self.moments.items()
            if moments.n
        }
        elements = {
            symbol: {"atoms": self.element_atoms[symbol], "systems": self.element_systems[symbol]}
            for symbol in sorted(self.element_atoms, key=lambda symbol: atomic_numbers[symbol])
        }
        return {"records": self.records, **quantities, "elements": elements}

    def _moments(self, name: str) -> Moments:
        return self.moments.setdefault(name, Moments())


def dataset_statistics(
    path: str | os.PathLike[str], progress: bool = False, keep_from: int = 1
) -> DataStatistics:
    """Statistics of all records of an LMDB, kept beside each of its files.

    Δpos is the minimum image of pos_relaxed - pos, over atoms that are not fixed.

    Args:
        path: an LMDB file, a folder of shards, or a folder with `data.lmdb`.
        progress: show a progress bar on stderr for each file that takes long to read.
        keep_from: records from which on a file's numbers are kept; those that are there are used in any case.

    Raises:
        InputError: nothing readable there, or a record that is damaged or not valid.
    """
    reader = RecordReader(path)
    total = DataStatistics()
    first = 0
    for file in reader.files:
        fingerprint, kept = content_fingerprint(file), statistics_path(file.path)
        statistics = _load(kept, file, fingerprint)
        if statistics is None:
            statistics = _measure(file, first, progress)
            if len(file) >= keep_from:
                _keep(kept, fingerprint, statistics)
        total.merge(statistics)
        first += len(file)
    return total


def statistics_tables(summary: Mapping[str, Any]) -> list[Table]:
    """What `DataStatistics.to_dict` gave, as tables for a terminal."""
    from rich.table import Table

    quantities = Table(title=f"{summary['records']} systems")
    for heading in ("quantity", "values", "mean", "std", "rms", "min", "max"):
        quantities.add_column(heading, justify="left" if heading == "quantity" else "right")
    for name, values in summary.items():
        if isinstance(values, Mapping) and "rms" in values:
            numbers = (f"{values[key]:.6g}" for key in ("mean", "std", "rms", "min", "max"))
            label = name + _UNITS.get(name, "")
            quantities.add_row(label, str(values["n"]), *numbers)
    elements = Table("element")
    for heading in ("atoms", "systems with it"):
        elements.add_column(heading, justify="right")
    for symbol, counts in summary["elements"].items():
        elements.add_row(symbol, str(counts["atoms"]), str(counts["systems"]))
    return [quantities, elements]


def statistics_path(path: Path) -> Path:
    """Where the statistics of an LMDB file are kept."""
    return path.with_name(f"{path.name}.stats.json")


def _measure(file: RecordFile, first: int, progress: bool) -> DataStatistics:
    statistics = DataStatistics()
    indices = range(len(file))
    for index in tracked(indices, len(file), f"Reading {file.path}") if progress else indices:
        name = file.name(index)
        record = load_record(file.read(index), name)
        data = normalize_record(record, name, default_sid=first + index)
        try:
            statistics.add(data)
        except InputError as error:
            raise InputError(f"{name}: {error}") from error
    return statistics


def _load(path: Path, file: RecordFile, fingerprint: str) -> DataStatistics | None:
    try:
        # The fingerprint samples the content: one label may change unseen by it, but not without a new date.
        if path.stat().st_mtime_ns < file.path.stat().st_mtime_ns:
            return None
        kept = json.loads(path.read_text(encoding="utf-8"))
        if (kept["version"], kept["fingerprint"]) != (VERSION, fingerprint):
            return None
        statistics = DataStatistics(
            {name: Moments(**values) for name, values in kept["moments"].items()},
            Counter(kept["element_atoms"]),
            Counter(kept["element_systems"]),
            Counter(kept["field_systems"]),
        )
        numbers = [value for moments in statistics.moments.values() for value in asdict(moments).values()]
        counters = statistics.element_atoms, statistics.element_systems, statistics.field_systems
        counts = [count for counter in counters for count in counter.values()]
        are_numbers = all(type(value) in (int, float) for value in numbers)
        are_counts = all(type(value) is int for value in counts)
        return statistics if are_numbers and are_counts and statistics.records == len(file) else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def _keep(path: Path, fingerprint: str, statistics: DataStatistics) -> None:
    """Beside the file where that can be written."""
    content = {
        "version": VERSION,
        "fingerprint": fingerprint,
        "moments": {name: asdict(moments) for name, moments in statistics.moments.items()},
        "element_atoms": statistics.element_atoms,
        "element_systems": statistics.element_systems,
        "field_systems": statistics.field_systems,
    }
    with suppress(OSError), replacing(path) as growing:
        growing.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
