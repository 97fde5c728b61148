"""Files and folders that appear whole or not at all.

What is written goes to a hidden neighbour of its place, on the same file system, and takes its name by one
rename when it is complete. A process that is killed on the way leaves the hidden neighbour, in which
unfinished files end in `.partial`, and nothing under the name itself.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from molflt.errors import InputError

PARTIAL = ".partial"
"""Ending of the files in an unfinished folder; `whole_folder` takes it off at the end."""


def check_destination(path: Path, overwrite: bool) -> None:
    """Require that nothing is at `path` yet, or may be replaced.

    Raises:
        InputError: something is there.
    """
    if not overwrite and (path.is_symlink() or path.exists()):
        raise InputError(f"{path} exists already; give another name, or --overwrite to replace it")


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A path to write a file to; it takes the name `path` when the block ends, replacing what is there.

    Raises:
        InputError: the place cannot be written.
    """
    with _writable(path), _neighbour(path) as folder:
        growing = folder / f"file{PARTIAL}"
        yield growing
        with open(growing, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(growing, path)


@contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """An empty folder to fill; it takes the name `path` when the block ends, replacing what is there.

    Files in it are written as `name.partial` and lose that ending at the end.

    Raises:
        InputError: the place cannot be written.
    """
    with _writable(path), _neighbour(path) as folder:
        growing = folder / "folder"
        growing.mkdir()
        yield growing
        for file in sorted(growing.rglob(f"*{PARTIAL}")):
            file.rename(file.with_suffix(""))
        if path.is_dir() and not path.is_symlink():
            path.rename(folder / "replaced")
        elif path.is_symlink() or path.exists():
            path.unlink()
        growing.rename(path)


@contextmanager
def _writable(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise InputError(
            f"{path} cannot be written: {error.strerror or error}; choose a writable place with room"
        ) from error


@contextmanager
def _neighbour(path: Path) -> Iterator[Path]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as folder:
        yield Path(folder)
