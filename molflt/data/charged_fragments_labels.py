"""Energies of point charges, in eV: in open boundaries, and in a sheet that repeats in two directions.

    E_open  = k sum_{i<j} q_i q_j / r_ij,     k = e^2 / (4 pi epsilon_0) = 14.3996 eV Å
    E_sheet = E_Ewald + 2 pi k M_z^2 / V

`EwaldSummation` of pymatgen repeats a structure in three directions. With enough vacuum between the layers,
and the second term (M_z the cell's dipole moment along z, V its volume), what is left of their interaction
falls as exp(-2 pi vacuum / lattice constant), so that the energy is that of one sheet.

Source: I.-C. Yeh and M. L. Berkowitz, J. Chem. Phys. 111, 3155 (1999).
"""

from __future__ import annotations

import itertools
import math

import numpy as np
from numpy.typing import NDArray

COULOMB = 14.399645478
"""k, eV Å (CODATA 2018)."""
VACUUM = 3.0
"""Height of the box that a sheet's energy is worked out in, in units of its longest lattice vector."""


def open_energy(charges: NDArray[np.float64], pos: NDArray[np.float64]) -> float:
    """Coulomb energy of charges [A] (in e) at positions [A, 3] (Å)."""
    first, second = np.triu_indices(len(charges), k=1)
    distances = np.linalg.norm(pos[first] - pos[second], axis=1)
    return float(COULOMB * (charges[first] * charges[second] / distances).sum())


def sheet_energy(
    charges: NDArray[np.float64],
    pos: NDArray[np.float64],
    cell: NDArray[np.float64],
    vacuum: float = VACUUM,
) -> float:
    """Coulomb energy per cell of a neutral sheet that repeats along the first two rows of `cell`.

    Args:
        charges: [A], in e, of sum 0.
        pos: [A, 3], Å.
        cell: [3, 3], Å; the first two rows lie in the plane z = 0, the third is not used.
        vacuum: height of the box in units of the longest lattice vector.

    Raises:
        ValueError: the charges do not sum to 0, or the cell does not lie in the plane.
    """
    from pymatgen.analysis.ewald import EwaldSummation
    from pymatgen.core import Lattice, Structure

    if abs(charges.sum()) > 1e-9:
        raise ValueError(f"charges must sum to 0, got {charges.sum():g}: a charged sheet has no energy")
    if np.abs(cell[:2, 2]).max() > 1e-9:
        raise ValueError(f"the first two rows of cell must have no z component, got {cell[:2].tolist()}")
    height = vacuum * np.linalg.norm(cell[:2], axis=1).max() + np.ptp(pos[:, 2])
    box = np.vstack([cell[:2], [0.0, 0.0, height]])
    # The elements do not matter, the charges are given with them.
    structure = Structure(
        Lattice(box),
        ["H"] * len(pos),
        pos,
        coords_are_cartesian=True,
        site_properties={"charge": charges.tolist()},
    )
    structure.add_oxidation_state_by_site(charges.tolist())
    energy = float(EwaldSummation(structure).total_energy)
    moment = float(charges @ pos[:, 2])
    return energy + 2 * math.pi * COULOMB * moment**2 / abs(float(np.linalg.det(box)))


def fragment_energy(
    charges: NDArray[np.float64], pos: NDArray[np.float64], fragment: NDArray[np.int64]
) -> float:
    """Sum of `open_energy` of each fragment alone, `fragment` [A] saying which atom is in which."""
    return sum(
        open_energy(charges[fragment == number], pos[fragment == number]) for number in np.unique(fragment)
    )


def smallest_separation(
    pos: NDArray[np.float64], fragment: NDArray[np.int64], cell: NDArray[np.float64] | None = None
) -> float:
    """Shortest distance between atoms of different fragments, Å.

    Images along the first two rows of `cell`, the nearest of each, count as other fragments too, those of a
    fragment itself included.
    """
    different = fragment[:, None] != fragment
    displacement = pos[:, None] - pos
    nearest = np.where(different, np.linalg.norm(displacement, axis=-1), np.inf).min(initial=np.inf)
    if cell is not None:
        for n, m in itertools.product((-1, 0, 1), repeat=2):
            if (n, m) != (0, 0):
                shifted = displacement + n * cell[0] + m * cell[1]
                nearest = min(nearest, np.linalg.norm(shifted, axis=-1).min())
    return float(nearest)
