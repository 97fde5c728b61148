"""XYZ and extended XYZ files, one frame at a time.

ASE's reader takes what it is told: it reads the first N atoms and leaves further ones, prefers atomic numbers
over symbols where a frame gives both, knows no deuterium, and one bad frame ends the file. Here the file is
cut into frames and each is checked before ASE parses it, so that the rest of a long trajectory survives.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from itertools import islice
from typing import TextIO

from ase import Atoms
from ase.data import atomic_numbers
from ase.io.extxyz import read_xyz

from molflt.errors import InputError

HYDROGEN_ISOTOPES = {"D": "deuterium", "T": "tritium"}
_PROPERTIES = re.compile(r"""Properties\s*=\s*["']?([^\s"']+)""", re.IGNORECASE)


def iter_xyz(stream: TextIO) -> Iterator[tuple[Atoms, list[str]] | InputError]:
    """Yield each frame of an (extended) XYZ file as atoms and notes, or why it is refused.

    Raises:
        InputError: where the next frame cannot be found, as the number of atoms does not fit the lines.
    """
    line = _next_filled_line(stream)
    while line:
        declared = line.strip()
        if not declared.isdecimal():
            raise InputError(
                f"expected a frame's number of atoms but found {declared[:40]!r}; correct the file"
            )
        if len(declared) > 8:
            raise InputError(f"declares {declared[:20]} atoms, more than any file holds; correct the number")
        block = list(islice(stream, 1 + int(declared)))
        listed = sum(1 for text in block[1:] if text.strip())
        if len(block) < 1 + int(declared):
            raise InputError(f"declares {declared} atoms but the file ends after {listed}; complete the file")
        line = _next_filled_line(stream)
        while line.startswith("VEC"):
            block.append(line)
            line = _next_filled_line(stream)
        if line and not line.strip().isdecimal():
            raise InputError(
                f"declares {declared} atoms but {line.strip()[:40]!r} follows them; correct the number"
            )
        try:
            yield _parse_frame(int(declared), block)
        except InputError as error:
            yield error


def plain_symbol(symbol: str) -> str:
    """Return the element that a symbol stands for: H for the hydrogen isotopes D and T, else itself."""
    return "H" if symbol in HYDROGEN_ISOTOPES else symbol


def isotope_note(symbols: list[str]) -> list[str]:
    """Say which hydrogen isotopes among `symbols` are computed as hydrogen."""
    return [
        f"{name} ({symbol}, {symbols.count(symbol)} atoms) is computed as hydrogen"
        for symbol, name in HYDROGEN_ISOTOPES.items()
        if symbol in symbols
    ]


def _parse_frame(num_atoms: int, block: list[str]) -> tuple[Atoms, list[str]]:
    if num_atoms == 0:
        return Atoms(), []
    columns = _column_numbers(block[0])
    rows = [text.split() for text in block[1 : 1 + num_atoms]]
    notes = []
    needed = max(columns.get("species", 0), columns.get("Z", 0))
    if "species" in columns and all(len(row) > needed for row in rows):
        at = columns["species"]
        symbols = [row[at] for row in rows]
        notes = isotope_note(symbols)
        _check_symbols(symbols, [row[columns["Z"]] for row in rows] if "Z" in columns else None)
        if notes:
            for row in rows:
                row[at] = plain_symbol(row[at])
            block = [block[0], *(" ".join(row) + "\n" for row in rows), *block[1 + num_atoms :]]
    text = f"{num_atoms}\n" + "".join(block)
    try:
        atoms = next(read_xyz(io.StringIO(text), index=0))
    except Exception as error:  # ASE's readers raise whatever a malformed line leads to
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise InputError(f"cannot be read as extended XYZ ({reason}); correct the frame") from error
    assert isinstance(atoms, Atoms)
    return atoms, notes


def _column_numbers(comment: str) -> dict[str, int]:
    """Return the first column of each per-atom property that the comment line declares."""
    found = _PROPERTIES.search(comment)
    parts = found.group(1).split(":") if found else ["species", "S", "1", "pos", "R", "3"]
    columns, at = {}, 0
    for name, width in zip(parts[::3], parts[2::3], strict=False):
        columns[name] = at
        at += int(width) if width.isdigit() else 1
    return columns


def _check_symbols(symbols: list[str], numbers: list[str] | None) -> None:
    for atom, symbol in enumerate(symbols):
        number = atomic_numbers.get(plain_symbol(symbol).capitalize())
        if not number:
            raise InputError(
                f"atom {atom} has the dummy or unknown element {symbol!r}; name a real element or remove it"
            )
        if numbers is not None and numbers[atom] != str(number):
            raise InputError(
                f"atom {atom} has symbol {symbol} but atomic number {numbers[atom]}; correct one of them"
            )


def _next_filled_line(stream: TextIO) -> str:
    """Return the next line that is not blank, or an empty string at the end."""
    for line in stream:
        if line.strip():
            return line
    return ""
