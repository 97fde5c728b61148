"""Data records in LMDB files, as OC20 lays them out: one pickled record under each key `0`, `1`, ...

Reading: `RecordReader` takes a file, a folder of shards or a folder with `data.lmdb`, counts records from
LMDB's own entry count (a stored `length` may be missing or wrong) and reads by index. It holds no lock, no
map and no state that a forked or spawned worker could spoil, and a damaged file gives an `InputError`.
`molflt.data.lmdb_writer` writes them.
"""

from __future__ import annotations

import bisect
import itertools
import os
import weakref
from pathlib import Path
from typing import Any

from molflt.data.lmdb_pages import PageError, PageFile
from molflt.data.pickles import load_record
from molflt.errors import InputError

LENGTH_KEY = b"length"
MAX_OPEN_FILES = 128
"""Shards of one data set that are open at a time: systems allow a process 256 to 1,024 files in all."""


def find_lmdb_files(path: str | os.PathLike[str]) -> list[Path]:
    """The LMDB files that `path` stands for: itself, or all `*.lmdb` of a folder in sorted order.

    A folder that LMDB made itself (with `data.mdb` inside) counts as the file within, at either level.

    Raises:
        InputError: nothing there, or no LMDB in the folder.
    """
    path = Path(path)
    if path.is_dir():
        if (inner := path / "data.mdb").is_file():
            return [inner]
        found = sorted(entry for entry in path.iterdir() if entry.suffix == ".lmdb")
        files = [entry / "data.mdb" if entry.is_dir() else entry for entry in found]
        if not files:
            raise InputError(
                f"{path} holds no .lmdb file; give an LMDB file, or the folder that holds its shards"
            )
        return files
    if not path.exists():
        raise InputError(f"{path} does not exist; give an LMDB file, or the folder that holds its shards")
    return [path]


class OpenFiles:
    """Keeps at most `MAX_OPEN_FILES` of some files open: the ones used last."""

    def __init__(self) -> None:
        # Weak, so that a file that nobody has any more is closed at once.
        self._files: dict[weakref.ref[RecordFile], None] = {}

    def use(self, file: RecordFile) -> None:
        """Note that a file is used, and park the one that has not been for longest if there are too many."""
        reference = weakref.ref(file)
        self._files.pop(reference, None)
        self._files[reference] = None
        while len(self._files) > MAX_OPEN_FILES:
            oldest = next(iter(self._files))
            del self._files[oldest]
            if (parked := oldest()) is not None:
                parked.park()


class RecordFile:
    """One LMDB file of numbered records.

    Args:
        path: the file.
        open_files: of a data set that it belongs to.

    Raises:
        InputError: the file is missing, empty, foreign, cut short or damaged.
    """

    def __init__(self, path: str | os.PathLike[str], open_files: OpenFiles | None = None) -> None:
        self.path = Path(path)
        self._open_files = open_files or OpenFiles()
        self._pages = self._guarded(PageFile, self.path)
        self._state = _file_state(self.path)
        self._is_parked = False
        self._keys: list[bytes] | None = None
        self._guarded(self._number_records)
        self._open_files.use(self)

    def __len__(self) -> int:
        return self._count

    def read(self, index: int) -> bytes:
        """The bytes of record `index`."""
        key = self._keys[index] if self._keys is not None else str(index).encode()
        value = self._guarded(self.pages.get, key)
        if value is None:
            raise InputError(
                f"{self.name(index)} is missing from the file; take the file from its source again"
            )
        return value

    def name(self, index: int) -> str:
        """What to call record `index` in a message."""
        key = self._keys[index].decode() if self._keys is not None else str(index)
        return f"record {key} of {self.path}"

    @property
    def pages(self) -> PageFile:
        """The file's pages, for whoever fingerprints them; a parked file is opened again.

        Raises `InputError` where another file has taken its place meanwhile.
        """
        if self._is_parked:
            self._pages = self._guarded(PageFile, self.path)
            self._is_parked = False
            if _file_state(self.path) != self._state:
                raise InputError(f"{self.path} has changed while it was in use; open the data set again")
        self._open_files.use(self)
        return self._pages

    @property
    def is_parked(self) -> bool:
        """Whether the file is closed until it is needed."""
        return self._is_parked

    def park(self) -> None:
        """Close the file until it is needed again."""
        if not self._is_parked:
            self._pages.close()
            self._is_parked = True

    def close(self) -> None:
        """Close the file for good."""
        self._pages.close()
        self._is_parked = False

    def _number_records(self) -> None:
        """Records are `0` to `n - 1` in nearly every file; only where they are not, all keys are listed."""
        pages = self._pages
        if pages.get(b"nextid") is not None:
            raise InputError(
                f"{self.path} is an ASE database in LMDB (.aselmdb), not OC20's format; read it with ase.db"
            )
        count = pages.entries - (pages.get(LENGTH_KEY) is not None)
        if count > 0 and self._is_gapless(count):
            self._count = count
            return
        self._keys = sorted((key for key in pages if key.isdigit()), key=lambda key: (len(key), key))
        self._count = len(self._keys)
        if not self._keys and count > 0:
            first = pages.first_key()
            raise InputError(
                f"{self.path} is an LMDB of something else: its {pages.entries} keys (first: {first!r}) are "
                "not numbers, as OC20's records have"
            )

    def _is_gapless(self, count: int) -> bool:
        """Whether the lowest, last and highest keys in byte order are those of `0` to `count - 1`."""
        last = str(count - 1)
        highest = max(last, "9" * (len(last) - 1)).encode()
        above = LENGTH_KEY if self._pages.get(LENGTH_KEY) is not None else highest
        return (
            self._pages.first_key() == b"0"
            and self._pages.last_key() == above
            and self._pages.get(last.encode()) is not None
            and self._pages.get(highest) is not None
            and self._pages.get(str(count).encode()) is None
        )

    def _guarded(self, function: Any, *args: Any) -> Any:
        try:
            return function(*args)
        except PageError as error:
            raise InputError(f"{self.path} is {error}; take the file from its source again") from None
        except OSError as error:
            raise InputError(f"{self.path} cannot be read: {error.strerror or error}") from None


class RecordReader:
    """Numbered records over one file or all shards of a folder; pickles as its path.

    Args:
        path: an LMDB file, a folder of `*.lmdb` shards, or a folder with `data.lmdb`.

    Raises:
        InputError: as `find_lmdb_files` and `RecordFile`.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._open()

    def _open(self) -> None:
        self.files: list[RecordFile] = []
        open_files = OpenFiles()
        for path in find_lmdb_files(self.path):
            self.files.append(RecordFile(path, open_files))
        self._ends = list(itertools.accumulate(len(file) for file in self.files))
        if not len(self):
            raise InputError(f"{self.path} holds no records; write some, or give another file")

    def __len__(self) -> int:
        return self._ends[-1]

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.path = state["path"]
        self._open()

    def locate(self, index: int) -> tuple[RecordFile, int]:
        """The file that holds record `index` (0 to len - 1), and the record's number in it."""
        if not 0 <= index < len(self):
            raise IndexError(f"record {index} of {len(self)} in {self.path}")
        shard = bisect.bisect_right(self._ends, index)
        return self.files[shard], index - (self._ends[shard] - len(self.files[shard]))

    def read(self, index: int) -> tuple[dict[str, Any], str]:
        """Record `index` as a dict of its raw fields, and what to call it in a message."""
        file, number = self.locate(index)
        name = file.name(number)
        return load_record(file.read(number), name), name

    def close(self) -> None:
        """Close all files."""
        for file in self.files:
            file.close()


def _file_state(path: Path) -> tuple[int, int, int]:
    """What tells a file from another of its name, and from itself after a change."""
    status = path.stat()
    return status.st_ino, status.st_size, status.st_mtime_ns
