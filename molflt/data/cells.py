"""Lattice geometry behind graphs and structures: which cells are usable, completed and reduced.

A cell is a [3, 3] array whose rows are the lattice vectors in Å; `pbc` says along which of them the structure
repeats. The other rows are never used, so they may be zero. A reduced cell (Minkowski) spans the same lattice
with the shortest vectors there are, which bounds how many neighbouring images a search has to visit.

Source: Nguyen and Stehlé, "Low-dimensional lattice basis reduction revisited", ACM Trans. Algorithms 5, 46
(2009), as implemented in `ase.geometry`.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from ase.geometry.minkowski_reduction import minkowski_reduce
from numpy.typing import ArrayLike, NDArray

from molflt.errors import InputError

MIN_RELATIVE_VOLUME = 1e-6
MAX_LENGTH = 1e6
"""Å; longer lattice vectors belong to no structure, and the images they span cannot be enumerated."""
ROUNDING = 1e-6
"""Relative; a sum of lattice vectors that is shorter than one of them by less is as long, as a hexagonal
cell's are in single precision."""
_STEPS = {
    0: np.zeros((0, 0)),
    1: np.zeros((0, 1)),
    2: np.array([[1.0, 1.0], [-1.0, 1.0]]),
    3: np.array(
        [[a, 1.0, 0.0] for a in (-1.0, 1.0)]
        + [[a, b, 1.0] for a in (-1.0, 0.0, 1.0) for b in (-1.0, 0.0, 1.0) if a or b]
    ),
}
"""For each number of vectors, the sums that must not be shorter than the last vector in them."""
_LAST = {
    number: np.array([np.flatnonzero(row)[-1] for row in steps], dtype=np.int64)
    for number, steps in _STEPS.items()
}


def check_cell(cell: ArrayLike, pbc: ArrayLike) -> None:
    """Refuse a cell that cannot repeat along its periodic directions.

    Args:
        cell: [3, 3], rows are lattice vectors, Å.
        pbc: [3], true along periodic directions.

    Raises:
        InputError: if a number of `cell` is not finite, a periodic vector has zero length or more than
            10⁶ Å, or the periodic vectors are linearly dependent: the volume (area) they span is below 1e-6
            of the product of their lengths.
    """
    cell = np.asarray(cell, dtype=np.float64)
    periodic = np.asarray(pbc, dtype=bool)
    if not np.isfinite(cell).all():
        raise InputError("cell holds NaN or infinite numbers; give three finite lattice vectors in Å")
    lengths = np.linalg.norm(cell, axis=1)
    for axis in np.flatnonzero(periodic & (lengths < 1e-6)):
        raise InputError(
            f"cell vector {'abc'[axis]} has zero length but pbc is on along it; give the vector or "
            "switch pbc off along it"
        )
    for axis in np.flatnonzero(periodic & (lengths > MAX_LENGTH)):
        raise InputError(f"cell vector {'abc'[axis]} is {lengths[axis]:.3g} Å long; correct the cell")
    vectors = cell[periodic] / lengths[periodic, None]
    volume = math.sqrt(max(np.linalg.det(vectors @ vectors.T), 0.0)) if len(vectors) else 1.0
    if volume < MIN_RELATIVE_VOLUME:
        names = ", ".join("abc"[axis] for axis in np.flatnonzero(periodic))
        raise InputError(
            f"periodic cell vectors {names} are linearly dependent (their relative volume is {volume:.1g}); "
            "correct the cell or switch pbc off along one of them"
        )


def complete_cell(
    cell: ArrayLike, pbc: ArrayLike, lengths: ArrayLike = (1.0, 1.0, 1.0)
) -> NDArray[np.float64]:
    """Replace the rows along open directions by vectors orthogonal to the periodic ones.

    Args:
        cell: [3, 3], rows are lattice vectors, Å.
        pbc: [3], true along periodic directions.
        lengths: [3], length given to the vectors that are put in, Å.

    Returns:
        [3, 3] cell whose periodic rows are those of `cell` and whose open rows are orthogonal to them and to
        each other.
    """
    completed = np.array(cell, dtype=np.float64)
    periodic = np.asarray(pbc, dtype=bool)
    if periodic.all():
        return completed
    completed[~periodic] = 0.0
    # The right singular vectors past the rank of the periodic rows are an orthonormal basis of the rest.
    rest = np.linalg.svd(completed)[2][periodic.sum() :]
    completed[~periodic] = rest * np.asarray(lengths, dtype=np.float64)[~periodic, None]
    return completed


def reduced_cell(cell: ArrayLike, pbc: ArrayLike) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Return the Minkowski-reduced basis of the periodic directions, and how it is made.

    Args:
        cell: [3, 3], rows are lattice vectors, Å. Open rows must be set (`complete_cell`).
        pbc: [3], true along periodic directions.

    Returns:
        (reduced, operation): `reduced = operation @ cell`, where `operation` is an integer matrix of
        determinant ±1. The set of periodic rows is the same in both, open rows are kept. A cell whose vectors
        are as short as they can be, to a relative `ROUNDING`, is returned as it is.

    Raises:
        InputError: if the lattice is too ill-conditioned to be reduced in float64.
    """
    given = np.asarray(cell, dtype=np.float64)
    # ASE annotates pbc as one bool but documents and takes an array.
    flags: Any = np.asarray(pbc, dtype=bool)
    if _is_reduced(given[flags]):
        return given, np.eye(3, dtype=np.int64)
    try:
        reduced, operation = minkowski_reduce(given, flags)
    except RuntimeError as error:
        raise InputError(
            f"cell cannot be reduced to short lattice vectors ({error}); give a less skewed cell"
        ) from error
    return np.asarray(reduced), np.asarray(operation, dtype=np.int64)


def _is_reduced(vectors: NDArray[np.float64]) -> bool:
    """Whether vectors [K, 3] are Minkowski-reduced but for rounding, in some order: what most cells are."""
    squares = (vectors**2).sum(axis=1)
    order = squares.argsort()
    sums = _STEPS[len(vectors)] @ vectors[order]
    bounds = squares[order].take(_LAST[len(vectors)])
    return bool(((sums**2).sum(axis=1) >= bounds * (1.0 - 2.0 * ROUNDING)).all())
