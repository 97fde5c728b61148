"""From a structure file to its frames: what the format is, who reads it, one bad frame at a time.

The content decides before the name: CIF, XYZ and POSCAR are recognised by their first lines, compression by
its first bytes, and for the rest ASE is asked, which looks for a signature before it believes a suffix. Files
are opened here and handed over as streams, so that a name with '@' or '://' in it is only a name.
"""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import re
import warnings
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import ase.io
from ase import Atoms
from ase.io.formats import UnknownFileTypeError, filetype, ioformats

from molflt.data.ase_databases import database_kind, iter_database
from molflt.data.poscar import looks_like_poscar, read_poscar
from molflt.data.validity import check_occupancies
from molflt.data.xyz import iter_xyz
from molflt.errors import InputError

PEEK_BYTES = 65536
_COMPRESSIONS: dict[bytes, Any] = {b"\x1f\x8b": gzip.open, b"BZh": bz2.open, b"\xfd7zXZ\x00": lzma.open}
_DAMAGES = (EOFError, gzip.BadGzipFile, zlib.error, lzma.LZMAError)
"""What reading cut or altered compressed files raises, besides the `OSError` of bzip2."""
_SILENT = (DeprecationWarning, PendingDeprecationWarning, FutureWarning, ResourceWarning)


class Frame(NamedTuple):
    """One structure as its reader returned it."""

    atoms: Atoms
    reader: str
    """Who read it, and as what."""
    notes: list[str]


def iter_frames(path: Path) -> Iterator[Frame | InputError]:
    """Yield every frame of a structure file, or in its place why it is refused.

    Raises:
        InputError: when nothing (more) can be read: no such file, not a file, empty, unknown format, damaged.
    """
    if not path.exists():
        raise InputError("does not exist; check the name")
    if not path.is_file():
        raise InputError("is not a file; give the structure files in it")
    try:
        with _open(path) as stream:
            head = stream.read(PEEK_BYTES)
    except _DAMAGES as error:
        raise InputError(f"is damaged ({_reason(error)}); replace it") from error
    except OSError as error:
        raise InputError(
            f"cannot be opened ({_reason(error)}); check the file and its permissions"
        ) from error
    if not head.strip():
        raise InputError("is empty; give a file with a structure")
    if database_kind(path, head) == "aselmdb":
        # Not through ASE: liblmdb maps the file, writes a lock beside it, and a cut one ends the process.
        yield from (Frame(atoms, "ASE (aselmdb)", []) for atoms in iter_database(path, "aselmdb"))
        return
    name = recognized_format(head) or _format_by_ase(path, head)
    own = name in ("cif", "extxyz", "vasp")
    yield from _explained(_iter_checked(path, name) if own else _iter_ase(path, name))


def recognized_format(head: bytes) -> str | None:
    """Name ASE's format that the first bytes of a file show: cif, extxyz, vasp, vasp-xdatcar, or None."""
    text = head.decode("utf-8", errors="replace").removeprefix("\ufeff")
    if re.search(r"^data_", text, re.MULTILINE | re.IGNORECASE) and re.search(
        r"^\s*_(cell_length_a|atom_site_)", text, re.MULTILINE
    ):
        return "cif"
    lines = text.splitlines()
    if looks_like_poscar(lines):
        is_xdatcar = len(lines) > 7 and lines[7].startswith("Direct configuration")
        return "vasp-xdatcar" if is_xdatcar else "vasp"
    declared = lines[0].strip()
    if declared.isdecimal() and (len(lines) < 3 or len(lines[2].split()) >= 4 or not declared.strip("0")):
        return "extxyz"
    return None


def _iter_checked(path: Path, name: str) -> Iterator[Frame | InputError]:
    """Read the formats whose text is checked here before a library parses it."""
    with _open(path) as raw, io.TextIOWrapper(raw, encoding="utf-8-sig", errors="replace") as stream:
        if name == "extxyz":
            frames, reader = iter_xyz(stream), "ASE (extxyz)"
        elif name == "cif":
            from molflt.data.pymatgen_io import iter_cif

            frames, reader = iter_cif(stream.read()), "pymatgen (cif)"
        else:
            frames, reader = iter([read_poscar(stream.read())]), "ASE (vasp)"
        for frame in frames:
            yield frame if isinstance(frame, InputError) else Frame(frame[0], reader, frame[1])


def _format_by_ase(path: Path, head: bytes) -> str:
    named_head = io.BytesIO(head)
    named_head.name = os.path.abspath(path)
    try:
        name = filetype(named_head)
    except UnknownFileTypeError:
        name = ""
    if name not in ioformats or not ioformats[name].can_read:
        raise InputError(
            "has no structure format known by content or name; convert it to extxyz, CIF or POSCAR"
        )
    return name


def _iter_ase(path: Path, name: str) -> Iterator[Frame | InputError]:
    form = ioformats[name]
    with _open(path) as raw:
        if name == "res":
            _check_res(raw.read().decode("utf-8", errors="replace"))
            raw.seek(0)
        source: Any = os.path.abspath(path)
        if form.acceptsfd:
            source = raw if form.isbinary else io.TextIOWrapper(raw, encoding="utf-8", errors="replace")
        count = 0
        try:
            for atoms in ase.io.iread(source, index=":", format=name, do_not_split_by_at_sign=True):
                count += 1
                yield Frame(atoms, f"ASE ({name})", [])
        except Exception as error:  # ASE's readers raise whatever a malformed file leads to
            raise InputError(
                f"cannot be read as {name} ({_reason(error)}); correct the file, or its name if that misleads"
            ) from error
    if not count:
        raise InputError(
            f"holds no structure (read as {name}, its likeliest format); give a structure file, and all of it"
        )


def _check_res(text: str) -> None:
    """Refuse what ASE's reader of SHELX files passes over: symmetry and occupancies."""
    labels: list[str] = []
    shares: list[float] = []
    for line in text.splitlines():
        words = line.split()
        if words[:1] == ["SYMM"] or (words[:1] == ["LATT"] and words[1:2] not in (["-1"], [])):
            raise InputError(
                "lists sites that its symmetry multiplies, which ASE does not apply; write it in P1"
            )
        if len(words) >= 6 and words[1].isdecimal():
            try:
                share = float(words[5])
            except ValueError:
                raise InputError(f"site {words[0]} has the occupancy {words[5]!r}; correct it") from None
            labels.append(f"site {words[0]}")
            # SHELX adds 10 to hold an occupancy fixed.
            shares.append(share - 10.0 if share > 10.0 else share)
    check_occupancies(shares, labels)


def _explained(frames: Iterator[Frame | InputError]) -> Iterator[Frame | InputError]:
    """Turn what readers warn about into notes, and failures of the stream into refusals."""
    while True:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                frame = next(frames, None)
            except (OSError, *_DAMAGES) as error:
                raise InputError(f"is damaged ({_reason(error)}); replace it") from error
        if frame is None:
            return
        if isinstance(frame, Frame):
            told = [" ".join(str(w.message).split()) for w in caught if not issubclass(w.category, _SILENT)]
            frame.notes.extend(f"reader's warning: {text[:200]}" for text in dict.fromkeys(told))
        yield frame


def _open(path: Path) -> BinaryIO:
    """Open a file for reading, decompressed if its first bytes say that it is compressed."""
    stream = open(path, "rb")  # noqa: SIM115 (the caller's to close)
    start = stream.read(6)
    stream.seek(0)
    opener = next((opener for magic, opener in _COMPRESSIONS.items() if start.startswith(magic)), None)
    if opener is None:
        return stream
    stream.close()
    return opener(path, "rb")


def _reason(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]
