"""Writing LMDB files of records: the same bytes for the same records, and the file is whole or absent."""

from __future__ import annotations

import itertools
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import lmdb
from torch_geometric.data import Data

from molflt.data.lmdb import LENGTH_KEY
from molflt.data.pickle_writer import Layout, dump_int, dump_record
from molflt.errors import InputError

_BATCH = 1000
_FIRST_MAP_SIZE = 1 << 24


def write_lmdb(
    path: str | os.PathLike[str],
    records: Iterable[Data | Mapping[str, Any]],
    layout: Layout = "pyg2",
    with_length: bool = True,
) -> int:
    """Write records as one OC20-format LMDB file; an existing file is replaced once the new one is whole.

    The file is built under a temporary name beside `path` and renamed, so an interrupted call leaves
    nothing that opens. It is compact (no free pages) and the same for the same records and page size.

    Args:
        path: the file to make; its folder is made if needed.
        records: `Data` objects or dicts of tensors, numbers and strings; consumed one by one.
        layout: `pyg2`, or `pyg1` for OC20's own (see `pickle_writer`).
        with_length: also store `length`, which some readers want.

    Returns:
        The number of records.

    Raises:
        InputError: the file cannot be written.
    """
    return write_entries(path, (dump_record(_fields(record), layout) for record in records), with_length)


def write_entries(path: str | os.PathLike[str], values: Iterable[bytes], length: bool | int = True) -> int:
    """Write values under the keys `0`, `1`, ...; otherwise as `write_lmdb`.

    `length` is whether to store the number of records; a number is stored as it is, right or wrong.
    """
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as folder:
            grown, compact = os.path.join(folder, "grown"), os.path.join(folder, "compact")
            with lmdb.open(
                grown, subdir=False, lock=False, sync=False, map_size=_FIRST_MAP_SIZE
            ) as environment:
                count = _put_all(environment, values, length)
                environment.copy(compact, compact=True)
            with open(compact, "rb+") as file:
                os.fsync(file.fileno())
            os.replace(compact, path)
    except (OSError, lmdb.Error) as error:
        raise InputError(f"{path} cannot be written: {error}; choose a writable place with room") from None
    return count


def _put_all(environment: lmdb.Environment, values: Iterable[bytes], length: bool | int) -> int:
    count = 0
    for batch in _batched(values, _BATCH):
        _put(environment, [(str(count + i).encode(), value) for i, value in enumerate(batch)])
        count += len(batch)
    if length is not False:
        _put(environment, [(LENGTH_KEY, dump_int(count if length is True else length))])
    return count


def _put(environment: lmdb.Environment, items: list[tuple[bytes, bytes]]) -> None:
    while True:
        try:
            with environment.begin(write=True) as transaction:
                for key, value in items:
                    transaction.put(key, value)
            return
        except lmdb.MapFullError:
            environment.set_mapsize(2 * environment.info()["map_size"])


def _batched(values: Iterable[bytes], size: int) -> Iterator[tuple[bytes, ...]]:
    iterator = iter(values)
    while batch := tuple(itertools.islice(iterator, size)):
        yield batch


def _fields(record: Data | Mapping[str, Any]) -> Mapping[str, Any]:
    return record.to_dict() if isinstance(record, Data) else record
