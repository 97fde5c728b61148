"""Builds `datasets/qm7`: small organic molecules with atomisation energies, split evenly over the energies.

The source is an extended XYZ file (gzip or not) with one molecule a frame, `id` and `energy_kcal_per_mol` in
its comment line. Energies are converted to eV, 1 kcal/mol = 4184 J/mol; positions are kept. A molecule has
open boundaries, no cell, no tags and no relaxed positions.

QM7's folds are stratified: molecules in the order of their energy, and of each five in a row one in each
fold. The source does not say which molecule is in which, so the five are dealt anew, in the order of a hash
of their ids: one to val, one to test and three to train.

Source: Rupp, Tkatchenko, Müller and von Lilienfeld, Phys. Rev. Lett. 108, 058301 (2012).
"""

from __future__ import annotations

import gzip
import hashlib
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from molflt.data.lmdb_writer import write_lmdb
from molflt.errors import InputError

EV_PER_KCAL_PER_MOL = 4184.0 / (6.02214076e23 * 1.602176634e-19)
"""Exact in the SI of 2019: 0.0433641..."""
FOLD = ("val", "test", "train", "train", "train")
"""Where the molecules of five neighbours in energy go, in the order of their hashes."""
SPLITS = ("train", "val", "test")
SPLIT_SEED = 0

_ENERGY = re.compile(r"\benergy_kcal_per_mol=(\S+)")
_ID = re.compile(r"\bid=(\d+)\b")
_GZIP_MAGIC = b"\x1f\x8b"


class Molecule(NamedTuple):
    """One molecule of the source."""

    sid: int
    atomic_numbers: np.ndarray
    """`[A]`."""
    pos: np.ndarray
    """`[A, 3]`, Å."""
    energy: float
    """Atomisation energy, eV; negative for a bound molecule."""


def build_qm7(source: str | Path, output_dir: str | Path, molecules: int | None = None) -> Path:
    """Build the data set: one LMDB per split, and `SPLITS.md`.

    The same source gives the same files, byte for byte where the page size of memory is the same.

    Args:
        source: `qm7.extxyz.gz` or the file in it.
        output_dir: folder to fill; files of these names there are replaced.
        molecules: how many to keep, those with the lowest seeded hashes of their ids; all by default.

    Returns:
        The folder.

    Raises:
        InputError: the source is missing, is no such file, or has fewer molecules than asked for.
    """
    output_dir = Path(output_dir)
    found = list(read_molecules(source))
    if len({molecule.sid for molecule in found}) < len(found):
        raise InputError(f"{source} has an id more than once; build from an unaltered source")
    wanted = len(found) if molecules is None else molecules
    if not len(FOLD) <= wanted <= len(found):
        raise InputError(f"{source} has {len(found)} molecules, asked for {wanted}; ask for 5 to that many")
    splits = assign_splits(sorted(found, key=lambda molecule: _hash(molecule.sid))[:wanted])
    for split, members in splits.items():
        write_lmdb(output_dir / split / "data.0000.lmdb", map(to_record, members))
    (output_dir / "SPLITS.md").write_text(split_report(splits, len(found)), encoding="utf-8")
    return output_dir


def assign_splits(molecules: Sequence[Molecule]) -> dict[str, list[Molecule]]:
    """Split so that each split has the energies of all; it does not depend on the order given."""
    ordered = sorted(molecules, key=lambda molecule: (molecule.energy, molecule.sid))
    splits: dict[str, list[Molecule]] = {split: [] for split in SPLITS}
    for start in range(0, len(ordered), len(FOLD)):
        dealt = sorted(ordered[start : start + len(FOLD)], key=lambda molecule: _hash(molecule.sid))
        # The last group may be short: its molecules go to train.
        places = FOLD if len(dealt) == len(FOLD) else ("train",) * len(dealt)
        for molecule, split in zip(dealt, places, strict=True):
            splits[split].append(molecule)
    return {split: sorted(members, key=lambda molecule: molecule.sid) for split, members in splits.items()}


def to_record(molecule: Molecule) -> dict[str, Any]:
    """The molecule's fields, types as in OC20's LMDBs."""
    return {
        "pos": torch.tensor(molecule.pos, dtype=torch.float32),
        "atomic_numbers": torch.tensor(molecule.atomic_numbers, dtype=torch.float32),
        "natoms": len(molecule.pos),
        "sid": molecule.sid,
        "y_relaxed": molecule.energy,
    }


def read_molecules(source: str | Path) -> Iterator[Molecule]:
    """The source's molecules in its order.

    A reader of this file's own form: ASE's takes 14 ms a frame.

    Raises:
        InputError: naming the frame and what is wrong with it.
    """
    lines = iter(_text(source).splitlines())
    frame = 0
    for line in lines:
        if not line.strip():
            continue
        try:
            yield _molecule(int(line), next(lines), lines)
        except (ValueError, KeyError, StopIteration, AttributeError) as error:
            raise InputError(
                f"frame {frame} of {source} is no molecule of QM7 ({type(error).__name__}: {error}); "
                "build from an unaltered source"
            ) from None
        frame += 1
    if frame == 0:
        raise InputError(f"{source} is empty; give qm7.extxyz.gz")


def split_report(splits: Mapping[str, Sequence[Molecule]], of: int) -> str:
    """Markdown of what each split holds, `of` being the number of molecules of the source."""
    kept = sum(map(len, splits.values()))
    lines = [
        "# Splits of QM7",
        "",
        f"Written by `molflt data build qm7`: {kept} of the source's {of} molecules. Stratified: of each",
        "five neighbours in energy one is in val, one in test and three are in train.",
        "",
        "| split | molecules | atoms | energy mean ± std, eV | min to max, eV |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for split, members in splits.items():
        energies = np.array([molecule.energy for molecule in members])
        atoms = [len(molecule.pos) for molecule in members]
        lines.append(
            f"| {split} | {len(members)} | {min(atoms)} to {max(atoms)} "
            f"| {energies.mean():.2f} ± {energies.std():.2f} | {energies.min():.2f} to {energies.max():.2f} |"
        )
    return "\n".join([*lines, ""])


def _molecule(num_atoms: int, comment: str, lines: Iterator[str]) -> Molecule:
    from ase.data import atomic_numbers

    if num_atoms < 1:
        raise ValueError(f"{num_atoms} atoms")
    energy, sid = _ENERGY.search(comment), _ID.search(comment)
    if energy is None or sid is None:
        raise ValueError("no id or energy_kcal_per_mol in its comment")
    rows = [row.split() for row in islice(lines, num_atoms)]
    if len(rows) < num_atoms or any(len(row) != 4 for row in rows):
        raise ValueError("not one symbol and three coordinates for each atom")
    pos = np.array([row[1:] for row in rows], dtype=float)
    value = float(energy.group(1)) * EV_PER_KCAL_PER_MOL
    if not (np.isfinite(pos).all() and np.isfinite(value)):
        raise ValueError("a coordinate or the energy is not finite")
    return Molecule(int(sid.group(1)), np.array([atomic_numbers[row[0]] for row in rows]), pos, value)


def _text(source: str | Path) -> str:
    try:
        raw = Path(source).read_bytes()
        if raw.startswith(_GZIP_MAGIC):
            raw = gzip.decompress(raw)
        return raw.decode()
    except (EOFError, UnicodeDecodeError, zlib.error, gzip.BadGzipFile) as error:
        raise InputError(
            f"{source} is no extended XYZ file, gzip or not ({error}); give qm7.extxyz.gz"
        ) from None
    except OSError as error:
        raise InputError(f"{source} cannot be read: {error.strerror or error}") from None


def _hash(sid: int) -> str:
    return hashlib.sha256(f"{SPLIT_SEED}:{sid}".encode()).hexdigest()
