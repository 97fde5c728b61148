"""From what a user names (files, folders, patterns, a list on stdin) to structures, one by one.

Nothing is read before it is asked for, so that any number of files costs no more memory than one.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from ase.io.formats import UnknownFileTypeError, filetype, ioformats, match_magic

from molflt.data.datasets import OC20IS2RE
from molflt.data.structure_formats import PEEK_BYTES, recognized_format
from molflt.data.structures import Structure, StructureError, iter_structures
from molflt.errors import InputError
from molflt.prediction.inputs import structure_from_data

STDIN = "-"
_MARKS = {".json": b'"numbers"', ".md": b"<-- ", ".in": b"atom"}
"""What a structure file has among its first bytes whose name could as well be that of something else."""
_SHARED = (".log", ".out", ".dat", ".data")
"""What the text of any program may be called; ASE's formats of these names begin with signatures."""
_COMPRESSED = (".gz", ".bz2", ".xz")


def expand_paths(
    words: Iterable[str],
    stdin: Iterable[str] | Iterable[bytes] | None = None,
    exclude: Iterable[str | os.PathLike[str]] = (),
    on_skip: Callable[[str], None] | None = None,
) -> Iterator[str | StructureError]:
    """The files that words on a command line stand for, in order.

    Args:
        words: a file; a folder, which stands for the structure files anywhere below it, sorted, hidden ones
            and linked folders left out; a pattern with `*`, `?`, `[...]` or `**`; or `-` for a list in
            `stdin`, one file or folder a line. What exists under its literal name is taken as that.
        stdin: lines that `-` reads its list from; bytes are names in whatever encoding files have.
        exclude: files and folders that are no input, such as the output: folders and patterns do not stand
            for them or for what is in them, and named as such they are an error.
        on_skip: told each file below a folder that is no structure file by content or name.

    Yields:
        Paths, and an error in the place of a word that stands for nothing.
    """
    excluded = {os.path.realpath(path) for path in exclude}

    def is_excluded(path: str) -> bool:
        real = os.path.realpath(path)
        return any(real == place or real.startswith(place + os.sep) for place in excluded)

    def expand(word: str, is_pattern: bool) -> Iterator[str | StructureError]:
        if "\0" in word:
            yield StructureError(word, None, "holds a NUL, as no name does; list one file a line")
            return
        found = "matches no file; check the pattern"
        if os.path.isdir(word):
            paths, found = _walk(word, on_skip), "holds no structure file"
        elif is_pattern:
            paths = (path for path in sorted(glob.glob(word, recursive=True)) if not os.path.isdir(path))
        else:
            yield StructureError(word, None, "is the output; give another") if is_excluded(word) else word
            return
        kept = (path for path in paths if not is_excluded(path))
        first = next(kept, None)
        if first is None:
            yield StructureError(word, None, found)
            return
        yield first
        yield from kept

    for word in words:
        if word == STDIN:
            for line in stdin or ():
                name = os.fsdecode(line).rstrip("\r\n")
                if name.strip():
                    yield from expand(name, False)
        else:
            yield from expand(word, glob.has_magic(word) and not os.path.lexists(word))


def iter_inputs(
    paths: Iterable[str | StructureError], radius: float = 0.0
) -> Iterator[Structure | StructureError]:
    """The structures in files, errors in the place of bad frames and files; `.lmdb` files as OC20's.

    `radius` is that of the network (`Predictor.radius`), so that the checks and its graph share a search for
    neighbours; it changes no result.
    """
    for path in paths:
        if isinstance(path, StructureError):
            yield path
        elif path.endswith(".lmdb"):
            yield from _iter_lmdb(path, radius)
        else:
            yield from iter_structures(path, radius)


def is_structure_file(path: str) -> bool:
    """Whether a file's first bytes or its name are those of a format that structures come in.

    Pipes, sockets and devices, which may not end or never begin, are none.
    """
    if os.path.exists(path) and not os.path.isfile(path):
        return False
    if path.endswith(".lmdb"):
        return True
    if path.endswith(_COMPRESSED):
        return _has_known_name(os.path.splitext(path)[0])
    try:
        with open(path, "rb") as file:
            head = file.read(PEEK_BYTES)
    except OSError:
        return _has_known_name(path)
    if not head.strip():
        return _has_known_name(path)
    if recognized_format(head) is not None:
        return True
    for suffix, mark in _MARKS.items():
        if path.endswith(suffix):
            return mark in head
    if path.endswith(_SHARED):
        return _has_signature(head)
    try:
        return ioformats[filetype(os.path.abspath(path))].can_read
    except (UnknownFileTypeError, KeyError, OSError, UnicodeDecodeError):
        return False


def _has_signature(head: bytes) -> bool:
    try:
        return match_magic(head).can_read
    except UnknownFileTypeError:
        return False


def _has_known_name(path: str) -> bool:
    try:
        return ioformats[filetype(path, read=False, guess=False)].can_read
    except (UnknownFileTypeError, KeyError):
        return False


def _walk(folder: str, on_skip: Callable[[str], None] | None) -> Iterator[str]:
    for parent, below, names in os.walk(folder):
        below[:] = sorted(name for name in below if not name.startswith("."))
        for name in sorted(names):
            path = os.path.join(parent, name)
            if name.startswith("."):
                continue
            if is_structure_file(path):
                yield path
            elif on_skip is not None:
                on_skip(path)


def _iter_lmdb(path: str, radius: float) -> Iterator[Structure | StructureError]:
    try:
        dataset = OC20IS2RE(Path(path))
        count = len(dataset)
    except InputError as error:
        yield StructureError(path, None, str(error))
        return
    for index in range(count):
        try:
            yield replace(structure_from_data(dataset.get(index), radius=radius), source=path, frame=index)
        except StructureError as error:
            yield StructureError(path, index, f"{error.source}: {error.reason}")
        except InputError as error:
            yield StructureError(path, index, str(error))
