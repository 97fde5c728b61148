"""Structure files and objects of ASE and pymatgen as the `Data` that molflt computes with.

`read_structures` takes everything ASE reads, and CIF by way of pymatgen. Positions and cell stay as given:
nothing is wrapped, centred or reduced. What would make an answer wrong (disorder, dummy atoms, overlaps,
impossible cells) is refused by name; what is a matter of interpretation (where the tags come from, isotopes,
energies that are no labels) is accepted and stated in `Structure.notes`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ase import Atoms
from ase.constraints import FixAtoms
from ase.data import covalent_radii
from numpy.typing import NDArray
from torch_geometric.data import Data

from molflt.data.fields import StructureData
from molflt.data.graphs import Neighbors
from molflt.data.slabs import bond_reach
from molflt.data.structure_formats import iter_frames
from molflt.data.tags import TagSource, assign_tags
from molflt.data.validity import SEARCH_RADIUS, check_occupancies, check_structure
from molflt.errors import InputError


class StructureError(InputError):
    """A structure that is refused: `source` and `frame` (None: the rest of the file) and the `reason`."""

    def __init__(self, source: str, frame: int | None, reason: str) -> None:
        where = source if frame is None else f"{source}, frame {frame}"
        super().__init__(f"{where}: {reason}")
        self.source, self.frame, self.reason = source, frame, reason


@dataclass
class Structure:
    """One structure, ready for a model, and what is known about how it was read."""

    data: Data
    """Fields pos [A, 3], cell [1, 3, 3] (Å, float32), pbc [1, 3], atomic_numbers, fixed [A], natoms [1], and
    for slabs tags [A]."""
    source: str
    """The file, or what the caller named."""
    frame: int
    """Position in the file, from 0."""
    formula: str
    """Chemical formula in Hill order."""
    tag_source: TagSource
    """`given` (OC20 tags), `ase-layers`, `derived`, or `none` (a molecule or crystal: all atoms count)."""
    notes: list[str] = field(default_factory=list)
    """Interpretations and oddities, one sentence each."""
    reader: str = ""
    """Who read it and as what, such as `pymatgen (cif)`."""
    neighbors: Neighbors | None = field(default=None, repr=False, compare=False)
    """Of the positions in `data`, at least as far as the reader was asked to look; None where nobody did."""


def read_structures(path: str | os.PathLike[str]) -> list[Structure]:
    """Read all structures of a file.

    Args:
        path: any structure file, compressed (.gz, .bz2, .xz) or not.

    Returns:
        One structure per frame, in the order of the file.

    Raises:
        StructureError: an `InputError` naming the file, the frame, the atom and the remedy, at the first
            frame that is refused.

    Example:
        >>> import tempfile, ase.build
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     ase.build.molecule("H2O").write(folder + "/water.xyz")
        ...     [structure] = read_structures(folder + "/water.xyz")
        >>> structure.formula, structure.tag_source
        ('H2O', 'none')
    """
    structures = []
    for structure in iter_structures(path):
        if isinstance(structure, StructureError):
            raise structure
        structures.append(structure)
    return structures


def iter_structures(
    path: str | os.PathLike[str], radius: float = 0.0
) -> Iterator[Structure | StructureError]:
    """Yield the structures of a file one by one, a refusal in the place of each bad frame.

    Only one frame is held at a time where the format allows it (XYZ, trajectories, databases). `radius`, Å:
    how far `Structure.neighbors` are to reach, as the checks and a model can share them.
    """
    source = os.fspath(path)
    frame = 0
    try:
        for item in iter_frames(Path(source)):
            if isinstance(item, InputError):
                yield StructureError(source, frame, str(item))
            else:
                yield _checked(item.atoms, source, frame, item.notes, item.reader, radius)
            frame += 1
    except InputError as error:
        yield StructureError(source, frame or None, str(error))


def structure_from_atoms(
    atoms: Atoms, source: str = "Atoms", frame: int = 0, radius: float = 0.0
) -> Structure:
    """Convert one `ase.Atoms`; `radius` as in `iter_structures`.

    Raises:
        StructureError: if the structure is refused.
    """
    structure = _checked(atoms, source, frame, [], "ASE (Atoms)", radius)
    if isinstance(structure, StructureError):
        raise structure
    return structure


def structure_from_pymatgen(
    obj: Any, source: str = "pymatgen", frame: int = 0, radius: float = 0.0
) -> Structure:
    """Convert one pymatgen Structure or Molecule; `radius` as in `iter_structures`.

    Raises:
        StructureError: if the structure is refused, for instance as it is disordered.
    """
    from molflt.data.pymatgen_io import atoms_from_pymatgen

    try:
        atoms, notes = atoms_from_pymatgen(obj)
    except InputError as error:
        raise StructureError(source, frame, str(error)) from error
    structure = _checked(atoms, source, frame, notes, f"pymatgen ({type(obj).__name__})", radius)
    if isinstance(structure, StructureError):
        raise structure
    return structure


def _checked(
    atoms: Atoms, source: str, frame: int, notes: list[str], reader: str, radius: float
) -> Structure | StructureError:
    try:
        return _convert(atoms, source, frame, notes, reader, radius)
    except InputError as error:
        return StructureError(source, frame, str(error))


def _convert(
    atoms: Atoms, source: str, frame: int, notes: list[str], reader: str, radius: float
) -> Structure:
    numbers = np.asarray(atoms.numbers, dtype=np.int64)
    pos = np.asarray(atoms.positions, dtype=np.float64)
    cell = np.asarray(atoms.cell.array, dtype=np.float64)
    pbc = np.asarray(atoms.pbc, dtype=bool)
    neighbors = check_structure(numbers, pos, cell, pbc, max(radius, reach(numbers)))
    _check_recorded_occupancies(atoms)
    given = np.asarray(atoms.get_tags()) if atoms.has("tags") else None
    assigned = assign_tags(numbers, pos, cell, pbc, given, neighbors)
    data = StructureData(
        pos=torch.from_numpy(pos).float(),
        cell=torch.from_numpy(cell).float().reshape(1, 3, 3),
        pbc=torch.from_numpy(pbc).reshape(1, 3),
        atomic_numbers=torch.from_numpy(numbers),
        fixed=torch.from_numpy(_fixed_atoms(atoms)),
        natoms=torch.tensor([len(numbers)]),
    )
    if assigned.tags is not None:
        data.tags = torch.from_numpy(assigned.tags)
    return Structure(
        data=data,
        source=source,
        frame=frame,
        formula=atoms.get_chemical_formula(),
        tag_source=assigned.source,
        notes=[
            *notes,
            *_cell_notes(cell, pbc),
            *assigned.notes,
            *_label_notes(atoms),
            *_constraint_notes(atoms),
        ],
        reader=reader,
        neighbors=neighbors if radius else None,
    )


def reach(numbers: NDArray[np.int64]) -> float:
    """How far neighbours are to be known for the checks of a structure and its tags, Å."""
    known = numbers[(numbers > 0) & (numbers < len(covalent_radii))]
    return max(SEARCH_RADIUS, bond_reach(known) if len(known) else 0.0)


def _check_recorded_occupancies(atoms: Atoms) -> None:
    """Refuse partial occupancies that ASE carries along without acting on them."""
    for name in ("occupancy", "occupancies"):
        shares = atoms.arrays.get(name)
        if shares is not None and shares.ndim == 1 and shares.dtype.kind in "fiu":
            check_occupancies(shares, [f"atom {i} ({symbol})" for i, symbol in enumerate(atoms.symbols)])
    recorded = atoms.info.get("occupancy")
    if isinstance(recorded, dict):
        for site, species in recorded.items():
            if isinstance(species, dict) and species:
                check_occupancies([min(species.values())], [f"site {site} ({', '.join(species)})"])


def _fixed_atoms(atoms: Atoms) -> NDArray[np.bool_]:
    """Return the mask [A] of atoms that constraints hold in all three directions."""
    fixed = np.zeros(len(atoms), dtype=bool)
    for constraint in atoms.constraints:
        if isinstance(constraint, FixAtoms) or (hasattr(constraint, "mask") and np.all(constraint.mask)):
            fixed[constraint.index] = True
    return fixed


def _constraint_notes(atoms: Atoms) -> list[str]:
    others = sorted(
        {
            type(constraint).__name__
            for constraint in atoms.constraints
            if not isinstance(constraint, FixAtoms)
            and not (hasattr(constraint, "mask") and np.all(constraint.mask))
        }
    )
    return [f"constraints that do not fix an atom fully are ignored: {', '.join(others)}"] if others else []


def _cell_notes(cell: NDArray[np.float64], pbc: NDArray[np.bool_]) -> list[str]:
    """Say that a cell is there but nothing repeats: a box around a molecule, or a slab whose pbc was lost."""
    if pbc.any() or np.linalg.matrix_rank(cell) < 3:
        return []
    return ["pbc is off in all directions: the cell is not used, and the structure is a molecule"]


def _label_notes(atoms: Atoms) -> list[str]:
    """Say that an energy in the file exists and is no label: its reference is unknown."""
    results = getattr(atoms.calc, "results", None) or {}
    energy = results.get("energy", results.get("free_energy"))
    if energy is None:
        return []
    return [f"the energy in the file ({float(energy):.6g} eV) is not used: its reference is unknown"]
