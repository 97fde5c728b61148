"""Builds `datasets/charged_fragments`: fragments that no radius graph connects, with their Coulomb energy.

Every system has the same fragments: two Na+ and two Cl- ions and a dipole NaCl, the element standing for the
charge. Atoms of different fragments are 7 Å apart or further, so with a radius below that all systems have
the same near graph, and what differs, the arrangement, is the label:

    y = E(all charges) - sum of E(fragment alone)

in eV, from `molflt.data.charged_fragments_labels`. Two sets: `open`, molecules in open boundaries with all
atoms within 20 Å of each other, and `sheets`, which repeat in two directions and whose vacuum means nothing.
What attention does not carry from one fragment to another can not be told, and the best guess is the median.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from molflt.data.charged_fragments_labels import (
    fragment_energy,
    open_energy,
    sheet_energy,
    smallest_separation,
)
from molflt.data.lmdb_writer import write_lmdb

CHARGES = {"Na": 1.0, "Cl": -1.0}
"""In units of e."""
FRAGMENTS = (("Na",), ("Na",), ("Cl",), ("Cl",), ("Na", "Cl"))
BOND = 2.36
"""Å, between Na and Cl (that of the free molecule)."""
SEPARATION = 7.0
"""Å, least distance between atoms of different fragments, images included."""
DIAMETER = 20.0
"""Å, largest distance between atoms in open boundaries."""
SHEET_LENGTHS = (18.0, 24.0)
"""Å, range of a sheet's two lattice vectors."""
SHEET_ANGLES = (70.0, 110.0)
"""Degrees, range of the angle between them."""
SHEET_HEIGHT = 4.0
"""Å, range of the fragments' centres along z."""
SHEET_BOX = 30.0
"""Å, third lattice vector as stored; plays no part."""
NUM_SYSTEMS = {"train": 800, "val": 200}
SETS = ("open", "sheets")

_DECIMALS = 4  # positions, Å: what is left after them depends on the machine
_ENERGY_DECIMALS = 6
_ATTEMPTS = 200


class ChargedSystem(NamedTuple):
    """One arrangement of the fragments."""

    symbols: tuple[str, ...]
    pos: NDArray[np.float64]
    """`[A, 3]`, Å."""
    fragment: NDArray[np.int64]
    """`[A]`: which fragment an atom belongs to."""
    cell: NDArray[np.float64] | None
    """`[3, 3]`, Å, of a sheet, periodic along the first two rows; None in open boundaries."""

    @property
    def charges(self) -> NDArray[np.float64]:
        """`[A]`, in e."""
        return np.array([CHARGES[symbol] for symbol in self.symbols])

    def energy(self) -> float:
        """The label: what bringing the fragments together costs, eV (per cell of a sheet)."""
        if self.cell is None:
            total = open_energy(self.charges, self.pos)
        else:
            total = sheet_energy(self.charges, self.pos, self.cell)
        return round(total - fragment_energy(self.charges, self.pos, self.fragment), _ENERGY_DECIMALS)


def build_charged_fragments(
    output_dir: str | Path, seed: int = 0, num_systems: Mapping[str, int] = NUM_SYSTEMS
) -> Path:
    """Build both sets: an LMDB per set and split, `open/train` and so on, and `SUMMARY.md`.

    The same seed gives the same files, byte for byte where the page size of memory is the same.

    Args:
        output_dir: folder to fill; files of these names there are replaced.
        seed: of the arrangements.
        num_systems: split to its number of systems in each set.

    Returns:
        The folder.
    """
    output_dir = Path(output_dir)
    arrangers: dict[str, Callable[[np.random.Generator], ChargedSystem]] = {
        "open": arrange_open,
        "sheets": arrange_sheet,
    }
    labels: dict[str, NDArray[np.float64]] = {}
    for number, name in enumerate(SETS):
        rng = np.random.default_rng([seed, number])
        sid = 1_000_000 * (number + 1)
        for split, count in num_systems.items():
            records = [to_record(arrangers[name](rng), sid + index) for index in range(count)]
            write_lmdb(output_dir / name / split / "data.0000.lmdb", records)
            labels[f"{name}/{split}"] = np.array([record["y_relaxed"] for record in records])
            sid += count
    (output_dir / "SUMMARY.md").write_text(summary(labels, seed), encoding="utf-8")
    return output_dir


def arrange_open(rng: np.random.Generator) -> ChargedSystem:
    """Fragments in a ball, in random orientations."""

    def center() -> NDArray[np.float64]:
        return 0.5 * DIAMETER * rng.random() ** (1 / 3) * _direction(rng)

    return _arrange(rng, center, None)


def arrange_sheet(rng: np.random.Generator) -> ChargedSystem:
    """Fragments in a cell of random lengths and angle, at random heights and in random orientations."""
    first, second = rng.uniform(*SHEET_LENGTHS, size=2)
    angle = np.radians(rng.uniform(*SHEET_ANGLES))
    rows = [[first, 0.0, 0.0], [second * np.cos(angle), second * np.sin(angle), 0.0], [0.0, 0.0, SHEET_BOX]]
    cell = np.array(rows).round(_DECIMALS)

    def center() -> NDArray[np.float64]:
        height = np.array([0.0, 0.0, 0.5 * SHEET_BOX + SHEET_HEIGHT * (rng.random() - 0.5)])
        return rng.random(2) @ cell[:2] + height

    return _arrange(rng, center, cell)


def to_record(system: ChargedSystem, sid: int) -> dict[str, Any]:
    """The system's fields, types as in OC20's LMDBs, with `pbc`."""
    from ase.data import atomic_numbers

    record = {
        "pos": torch.tensor(system.pos, dtype=torch.float32),
        "atomic_numbers": torch.tensor([atomic_numbers[s] for s in system.symbols], dtype=torch.float32),
        "natoms": len(system.pos),
        "sid": sid,
        "y_relaxed": system.energy(),
    }
    if system.cell is not None:
        record["cell"] = torch.tensor(system.cell, dtype=torch.float32).view(1, 3, 3)
        record["pbc"] = torch.tensor([[True, True, False]])
    return record


def summary(labels: Mapping[str, Sequence[float] | NDArray[np.float64]], seed: int) -> str:
    """Markdown of the labels' spread: the standard deviation, and the MAE of the best constant."""
    lines = [
        "# Labels of charged_fragments",
        "",
        f"Written by `molflt data build charged-fragments --seed {seed}`. The last column is what a model",
        "that sees no fragment from another can reach: the mean absolute deviation from the median.",
        "",
        "| set and split | systems | mean, eV | std, eV | min to max, eV | MAE of the median, eV |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name, values in labels.items():
        y = np.asarray(values)
        spread = np.abs(y - np.median(y)).mean()
        lines.append(
            f"| {name} | {len(y)} | {y.mean():.4f} | {y.std():.4f} | {y.min():.2f} to {y.max():.2f} "
            f"| {spread:.4f} |"
        )
    return "\n".join([*lines, ""])


def _arrange(
    rng: np.random.Generator, center: Callable[[], NDArray[np.float64]], cell: NDArray[np.float64] | None
) -> ChargedSystem:
    """Put down the fragments in turn, each where it keeps its distance; begin again if one finds no room."""
    while True:
        pos, fragment = np.zeros((0, 3)), np.zeros(0, dtype=np.int64)
        for number, symbols in enumerate(FRAGMENTS):
            for _ in range(_ATTEMPTS):
                atoms = center() + _shape(rng, len(symbols))
                together = np.vstack([pos, atoms.round(_DECIMALS)])
                owner = np.append(fragment, [number] * len(symbols))
                if smallest_separation(together, owner, cell) >= SEPARATION and (
                    cell is not None or _diameter(together) <= DIAMETER
                ):
                    pos, fragment = together, owner
                    break
            else:
                break
        else:
            return ChargedSystem(sum(FRAGMENTS, ()), pos, fragment, cell)


def _shape(rng: np.random.Generator, num_atoms: int) -> NDArray[np.float64]:
    """Atoms of a fragment about its centre: one, or two a bond apart."""
    if num_atoms == 1:
        return np.zeros((1, 3))
    return 0.5 * BOND * np.array([[1.0], [-1.0]]) * _direction(rng)


def _direction(rng: np.random.Generator) -> NDArray[np.float64]:
    vector = rng.standard_normal(3)
    return vector / np.linalg.norm(vector)


def _diameter(pos: NDArray[np.float64]) -> float:
    return float(np.linalg.norm(pos[:, None] - pos, axis=-1).max())
