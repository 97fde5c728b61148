"""VASP structure files (POSCAR, CONTCAR, and the header of CHGCAR).

The elements are those of the line before the counts and nothing else. A file in VASP 4's format has no such
line; ASE then guesses from the comment line or from a POTCAR that happens to lie in the working directory,
and this reader refuses.
"""

from __future__ import annotations

import io

import ase.io
from ase import Atoms
from ase.data import atomic_numbers

from molflt.data.xyz import isotope_note, plain_symbol
from molflt.errors import InputError


def looks_like_poscar(lines: list[str]) -> bool:
    """Whether the first lines are a comment, a scale, three vectors, elements or counts, and counts."""
    if len(lines) < 7 or not _are_floats(lines[1].split("!")[0].split()[:1]):
        return False
    if not all(_starts_with_position(line) for line in lines[2:5]):
        return False
    return _counts(lines[5]) is not None or _counts(lines[6]) is not None


def read_poscar(text: str) -> tuple[Atoms, list[str]]:
    """Read one structure from the text of a POSCAR; anything after the positions is left unread.

    Args:
        text: the whole file.

    Returns:
        Atoms with fixed atoms (all three selective-dynamics flags F) as constraints, and notes.

    Raises:
        InputError: no line of element symbols (VASP 4), an unknown element, numbers of elements, counts and
            positions that disagree, or an unreadable number.
    """
    lines = text.splitlines()
    if not looks_like_poscar(lines):
        raise InputError(
            "has no POSCAR header (scale, three cell vectors, elements, counts); correct the file"
        )
    if _counts(lines[5]) is not None:
        raise InputError(
            "is in VASP 4's format, which does not name the elements; add a line with their symbols before "
            "the line with the counts"
        )
    # Pseudopotential suffixes (Na_pv) and hashes (Na_pv/6a2f) belong to VASP, not to the element.
    symbols = [word.split("/")[0].split("_")[0] for word in lines[5].split("!")[0].split()]
    counts = _counts(lines[6])
    if counts is None or len(symbols) != len(counts):
        raise InputError(
            f"names the elements {lines[5].strip()[:60]!r} but counts {lines[6].strip()[:60]!r}; "
            "give one count per element"
        )
    for symbol in symbols:
        if not atomic_numbers.get(plain_symbol(symbol)):
            raise InputError(
                f"names the dummy or unknown element {symbol!r}; give a real element or remove it"
            )
    lines += [""] * 9
    first = 8 if lines[7].strip()[:1].lower() != "s" else 9
    listed = 0
    while listed < sum(counts) and _starts_with_position(lines[first + listed]):
        listed += 1
    if listed < sum(counts):
        raise InputError(
            f"counts {sum(counts)} atoms but lists {listed} positions; correct the counts or the list"
        )
    header = [*lines[:5], " ".join(map(plain_symbol, symbols)), " ".join(map(str, counts))]
    if not sum(counts):
        return Atoms(), []
    kept = "\n".join([*header, *lines[7 : first + listed]]) + "\n"
    try:
        atoms = ase.io.read(io.StringIO(kept), format="vasp")
    except Exception as error:  # ASE's readers raise whatever a malformed line leads to
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise InputError(f"cannot be read as POSCAR ({reason}); correct the file") from error
    assert isinstance(atoms, Atoms)
    expanded = [symbol for symbol, count in zip(symbols, counts, strict=True) for _ in range(count)]
    return atoms, isotope_note(expanded)


def _counts(line: str) -> list[int] | None:
    words = line.split("!")[0].split()
    are_counts = all(word.isdecimal() and len(word) < 12 for word in words)
    return [int(word) for word in words] if words and are_counts else None


def _starts_with_position(line: str) -> bool:
    words = line.split()[:3]
    return len(words) == 3 and _are_floats(words)


def _are_floats(words: list[str]) -> bool:
    try:
        [float(word) for word in words]
    except ValueError:
        return False
    return bool(words)
