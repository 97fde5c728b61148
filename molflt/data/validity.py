"""What a structure must satisfy before molflt computes with it.

Readers of structure files let much through that a model then answers with a number: half-occupied sites,
dummy atoms, atoms on top of each other. Each check here refuses with one sentence that names the
atom (counted from 0), what is wrong with it and the remedy.
"""

from __future__ import annotations

import numpy as np
from ase.data import chemical_symbols
from numpy.typing import ArrayLike, NDArray

from molflt.data.graphs import Neighbors, find_neighbors
from molflt.errors import InputError

MIN_DISTANCE = 0.5
"""Å; no two nuclei in matter at rest come closer (H2 is 0.74 Å long)."""
SEARCH_RADIUS = 2.0
"""Å; how far neighbours are looked for where only overlaps matter: 0.5 Å would divide space too finely."""
FULL_OCCUPANCY_TOLERANCE = 1e-3
MAX_ROUNDING = 1e-3
"""Å; largest change that storing a position in float32 may make."""


def check_structure(
    numbers: NDArray[np.int64],
    pos: NDArray[np.float64],
    cell: NDArray[np.float64],
    pbc: NDArray[np.bool_],
    radius: float = SEARCH_RADIUS,
) -> Neighbors:
    """Refuse a structure that is no set of separate, real atoms in a usable cell.

    Args:
        numbers: [A] atomic numbers.
        pos: [A, 3] positions, Å.
        cell: [3, 3], rows are lattice vectors, Å.
        pbc: [3], true along periodic directions.
        radius: how far the neighbours are wanted that the check for overlaps finds anyway, Å, at least 0.5.

    Returns:
        The neighbours up to `radius` of the positions and the cell as they are stored, in single precision.

    Raises:
        InputError: no atoms; an atomic number outside 1 to 118; a coordinate that is NaN, infinite or too
            large for float32; a periodic direction without a proper cell vector; two atoms, images included,
            closer than 0.5 Å.
    """
    if not len(numbers):
        raise InputError("holds no atoms; leave it out")
    unknown = np.flatnonzero((numbers < 1) | (numbers >= len(chemical_symbols)))
    if len(unknown):
        atom = int(unknown[0])
        raise InputError(
            f"atom {atom} is a dummy or unknown element (atomic number {numbers[atom]}); "
            "give it a real element or remove it"
        )
    broken = np.flatnonzero(~np.isfinite(pos).all(axis=1))
    if len(broken):
        raise InputError(f"{_atom(numbers, broken[0])} has a NaN or infinite coordinate; correct it")
    rounding = np.abs(pos - _stored(pos)).max(axis=1)
    if rounding.max() > MAX_ROUNDING:
        raise InputError(
            f"{_atom(numbers, rounding.argmax())} lies {np.abs(pos[rounding.argmax()]).max():.3g} Å from the "
            "origin, too far for single precision; move the structure to the origin"
        )
    # It refuses an unusable cell too.
    neighbors = find_neighbors(_stored(pos), _stored(cell), pbc, radius)
    _check_distances(numbers, neighbors)
    return neighbors


def check_occupancies(occupancies: ArrayLike, names: list[str]) -> None:
    """Refuse sites that are not filled by exactly one atom.

    Args:
        occupancies: [A] share of each site that is filled.
        names: [A] what to call each site in the message.

    Raises:
        InputError: naming the first site whose occupancy is not 1.
    """
    partial = np.flatnonzero(
        np.abs(np.asarray(occupancies, dtype=np.float64) - 1.0) > FULL_OCCUPANCY_TOLERANCE
    )
    if len(partial):
        share = float(np.asarray(occupancies)[partial[0]])
        raise InputError(
            f"{names[partial[0]]} has occupancy {share:g}: a disordered site is no single structure; "
            "choose an ordered arrangement, with every occupancy 1"
        )


def _check_distances(numbers: NDArray[np.int64], neighbors: Neighbors) -> None:
    if not len(neighbors.distances):
        return
    closest = int(neighbors.distances.argmin())
    distance = neighbors.distances[closest]
    if distance >= MIN_DISTANCE:
        return
    sender, receiver = neighbors.sender[closest], neighbors.receiver[closest]
    image = " of a periodic image" if neighbors.offsets[closest].any() else ""
    raise InputError(
        f"{_atom(numbers, receiver)} and {_atom(numbers, sender)}{image} are {distance:.2f} Å "
        f"apart, below {MIN_DISTANCE} Å; remove duplicates or correct the positions and the cell"
    )


def _stored(vectors: NDArray[np.float64]) -> NDArray[np.float64]:
    with np.errstate(over="ignore"):  # infinity is refused
        return vectors.astype(np.float32).astype(np.float64)


def _atom(numbers: NDArray[np.int64], index: int | np.integer) -> str:
    return f"atom {int(index)} ({chemical_symbols[numbers[index]]})"
