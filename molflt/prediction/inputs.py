"""Whatever a structure comes as, as a `Structure` and then as what the network reads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from ase import Atoms
from ase.data import chemical_symbols
from ase.formula import Formula
from torch_geometric.data import Data

from molflt.data.fields import StructureData
from molflt.data.structures import (
    Structure,
    StructureError,
    structure_from_atoms,
    structure_from_pymatgen,
)
from molflt.data.validity import SEARCH_RADIUS, check_structure
from molflt.errors import InputError


def as_structure(structure: Any, number: int = 0, radius: float = 0.0) -> Structure:
    """A `Structure` from ASE `Atoms`, a pymatgen object, `Data` or a `Structure`; TypeError for others.

    `radius` as in `molflt.data.structures.iter_structures`.
    """
    convert = converter(structure)
    if convert is None:
        raise TypeError(
            f"structure {number} is a {type(structure).__name__}; give ase.Atoms, a pymatgen Structure or "
            "Molecule, a torch_geometric Data or what molflt.data.structures.read_structures returns"
        )
    return convert(structure, f"structure {number}", radius=radius)


def converter(structure: Any) -> Callable[..., Structure] | None:
    """What makes a `Structure` of an object, the name of its source and `radius`; None for no structure."""
    if isinstance(structure, Structure):
        return lambda structure, source, radius: structure
    if isinstance(structure, Data):
        return structure_from_data
    if isinstance(structure, Atoms):
        return structure_from_atoms
    # By its module, as importing pymatgen takes longer than reading most files.
    return structure_from_pymatgen if type(structure).__module__.startswith("pymatgen.") else None


def structure_from_data(data: Data, source: str = "Data", radius: float = 0.0) -> Structure:
    """A `Structure` from a PyG `Data` with `pos` (Å) and `atomic_numbers`; a `sid` becomes its source.

    `radius` as in `molflt.data.structures.iter_structures`. Raises `InputError` where these are missing and
    for what is refused in a file, such as overlapping atoms.
    """
    if data.get("sid") is not None:
        source = f"sid {int(data.sid)}"
    for name in ("pos", "atomic_numbers"):
        if data.get(name) is None:
            raise InputError(f"{source} has no {name}; a structure needs pos (Å) and atomic_numbers")
    filled = model_input(data)
    fields = (filled.atomic_numbers, filled["pos"], filled.cell[0], filled.pbc[0])
    try:
        numbers, pos, cell, pbc = (field.numpy() for field in fields)
        neighbors = check_structure(numbers, pos, cell, pbc, max(radius, SEARCH_RADIUS))
        if ((filled.tags < 0) | (filled.tags > 2)).any():
            raise InputError("has tags other than 0, 1 and 2; give OC20's, or none")
    except InputError as error:
        raise StructureError(source, None, str(error)) from error
    formula = Formula.from_list([chemical_symbols[z] for z in filled.atomic_numbers.tolist()]).format("hill")
    tag_source = "none" if data.get("tags") is None else "given"
    return Structure(
        data,
        source=source,
        frame=0,
        formula=formula,
        tag_source=tag_source,
        neighbors=neighbors if radius else None,
    )


def model_input(data: Data) -> StructureData:
    """The fields a network reads, with absent ones filled, so that any structures can share a batch.

    Without `cell` nothing repeats; without `pbc` a cell repeats in all directions, as in OC20; without
    `tags` all are 0 and every atom counts.
    """
    numbers, cell, pbc = data.atomic_numbers, data.get("cell"), data.get("pbc")
    if pbc is None:
        pbc = torch.full((1, 3), cell is not None)
    return StructureData(
        pos=data["pos"].float(),
        atomic_numbers=numbers.long(),
        cell=torch.zeros(1, 3, 3) if cell is None else cell.float().reshape(1, 3, 3),
        pbc=pbc.bool().reshape(1, 3),
        tags=torch.zeros_like(numbers, dtype=torch.long) if data.get("tags") is None else data.tags.long(),
    )
