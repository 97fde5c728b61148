"""How many atoms and edges each record has, and its id: what batching by size needs before reading anything.

Counting means looking at every record once, a few minutes for 460,328 of them. So the counts of a large
file are kept beside it, in `<name>.sizes.npz`, with a fingerprint of the file's content; if the file changes,
the counts are taken again. Where the folder cannot be written, they are taken each time. The edges of graphs
that are made on reading are counted and kept in the same way, in `<name>.edges.npz`.
"""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from molflt.data.lmdb import RecordFile, RecordReader
from molflt.data.pickles import peek_record
from molflt.data.records import REQUIRED, parse_sid
from molflt.errors import InputError
from molflt.replacing import replacing
from molflt.terminal import tracked

KEEP_FROM = 10_000
"""Records from which on a file's counts are kept; fewer take seconds."""
_SAMPLED_PAGES = 256


class RecordSizes(NamedTuple):
    """One row per record."""

    sid: Tensor
    """The records' ids, int64 [N]."""
    num_atoms: Tensor
    """Atoms, int64 [N]."""
    num_edges: Tensor
    """Edges stored in the record, 0 without, int64 [N]."""


def record_sizes(reader: RecordReader, progress: bool = False) -> RecordSizes:
    """Sizes of all records of a reader, from the kept counts where they are there and match the content.

    Args:
        reader: the records.
        progress: show a progress bar on stderr while counting.

    Raises:
        InputError: a record is damaged or has no atoms.
    """
    tables, first = [], 0
    for file in reader.files:
        tables.append(_file_sizes(file, first, progress))
        first += len(file)
    return RecordSizes(*(torch.from_numpy(column) for column in np.concatenate(tables, axis=1)))


def graph_edges(
    reader: RecordReader, count_edges: Callable[[int], int], settings: str, progress: bool = False
) -> Tensor:
    """Edges of the graph made of each record, int64 [N], from the kept counts where they match.

    Args:
        reader: the records.
        count_edges: of the record with this index.
        settings: what the graphs depend on beside the records, in words; kept counts for others do not match.
        progress: show a progress bar on stderr while counting.
    """

    def count(file: RecordFile, first: int) -> np.ndarray:
        indices = _indices(file, "Counting edges", progress)
        return np.array([[count_edges(first + index) for index in indices]], dtype=np.int64)

    tables, first = [], 0
    for file in reader.files:
        path = file.path.with_name(f"{file.path.name}.edges.npz")
        tables.append(_kept(file, path, settings, 1, partial(count, file, first)))
        first += len(file)
    return torch.from_numpy(np.concatenate(tables, axis=1)[0])


def content_fingerprint(file: RecordFile) -> str:
    """SHA-256 over an LMDB file's size, transaction number and 256 of its pages, evenly spread.

    Every committed write changes LMDB's transaction number; the pages tell apart files that were made anew.
    """
    pages = file.pages
    digest = hashlib.sha256(f"{pages.size} {pages.entries} {pages.transaction}".encode())
    total = pages.size // pages.page_size
    for number in np.unique(np.linspace(0, total - 1, min(total, _SAMPLED_PAGES)).astype(int)):
        digest.update(pages.read_page(int(number)))
    return digest.hexdigest()


def sizes_path(path: Path) -> Path:
    """Where the counts of an LMDB file are kept."""
    return path.with_name(f"{path.name}.sizes.npz")


def _file_sizes(file: RecordFile, first: int, progress: bool) -> np.ndarray:
    """Rows sid, atoms, edges; `first` is the place of the file's first record, its id where it has none."""
    return _kept(file, sizes_path(file.path), "", 3, lambda: _count(file, first, progress))


def _kept(
    file: RecordFile, path: Path, settings: str, rows: int, count: Callable[[], np.ndarray]
) -> np.ndarray:
    """The table [rows, records] that `count` makes, kept in `path` for a large file."""
    if len(file) < KEEP_FROM:
        return count()
    fingerprint = f"{content_fingerprint(file)} {settings}".strip()
    table = _load(path, fingerprint, (rows, len(file)))
    if table is None:
        table = count()
        _keep(path, fingerprint, table)
    return table


def _indices(file: RecordFile, text: str, progress: bool) -> Iterable[int]:
    indices = range(len(file))
    return tracked(indices, len(file), f"{text} in {file.path}") if progress else indices


def _count(file: RecordFile, first: int, progress: bool) -> np.ndarray:
    table = np.zeros((3, len(file)), dtype=np.int64)
    indices = _indices(file, "Counting atoms", progress)
    for index in indices:
        name = file.name(index)
        shapes, sid = peek_record(file.read(index), name)
        atoms = shapes.get("atomic_numbers", (0,))
        if len(atoms) != 1 or atoms[0] == 0:
            raise InputError(f"{name} has no atoms; a structure needs {' and '.join(map(repr, REQUIRED))}")
        edges = shapes.get("edge_index", (2, 0))
        table[:, index] = parse_sid(first + index if sid is None else sid, name), atoms[0], edges[-1]
    return table


def _load(path: Path, fingerprint: str, shape: tuple[int, int]) -> np.ndarray | None:
    try:
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as kept:
            table = kept["sizes"]
            if str(kept["fingerprint"]) == fingerprint and table.shape == shape and table.dtype == np.int64:
                return table
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        pass
    return None


def _keep(path: Path, fingerprint: str, table: np.ndarray) -> None:
    with suppress(OSError), replacing(path) as growing, open(growing, "wb") as file:
        np.savez(file, fingerprint=fingerprint, sizes=table)
