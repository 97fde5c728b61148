"""Geometry of slabs: the open direction, the adsorbate on it, the exposed surface.

A structure is a slab if exactly one direction is open (not periodic, or with a gap of at least 5 Å between
the atoms and their images), a crystal if none is, and a molecule (or chain) if more are.

What belongs to the adsorbate is a judgement that a file without tags leaves to the reader; the rules are in
`find_adsorbate`. On the 8 systems of `datasets/oc20_sample` they find exactly the atoms that OC20 tags 2.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from ase.data import covalent_radii
from numpy.typing import NDArray

from molflt.data.cells import complete_cell, reduced_cell
from molflt.data.graphs import Neighbors

VACUUM = 5.0
"""Å; smallest gap that counts as vacuum. Layers of a crystal are at most 4.5 Å apart."""
BOND_FACTOR = 1.25
"""Atoms closer than this times the sum of their covalent radii are bonded."""
NETWORK_FACTOR = 1.15
"""As `BOND_FACTOR`, for bonds that make a sheet: stricter, so that a dense adlayer is none."""
BURIED = 0.25
"""Å; mean height of the bonded slab atoms over an atom that is not on the slab but in it."""
IN_PLANE = 0.3
"""Å; bonded atoms that differ less in height lie in one plane."""
SURFACE_DEPTH = 2.0
"""Å below the highest slab atom; the height criterion by which OC20 tags surface atoms."""

NONMETALS = frozenset({1, 2, 6, 7, 8, 9, 10, 15, 16, 17, 18, 34, 35, 36, 53, 54, 85, 86})
"""H He C N O F Ne P S Cl Ar Se Br Kr I Xe At Rn: what adsorbates are made of."""
_IS_NONMETAL = np.isin(np.arange(len(covalent_radii)), list(NONMETALS))
MONOVALENT = frozenset({1, 9, 17, 35, 53, 85})
"""H F Cl Br I At: nonmetals that form no networks."""


class SlabFrame(NamedTuple):
    """The open direction of a slab."""

    heights: NDArray[np.float64]
    """[A] height of each atom along `up`, unwrapped across the vacuum, Å."""
    up: NDArray[np.float64]
    """[3] unit vector along the open direction, on the side of the open cell vector (or of +x, +y, +z)."""


class Bonds(NamedTuple):
    """Bonded pairs, each in both directions, images included."""

    first: NDArray[np.int64]
    second: NDArray[np.int64]
    offsets: NDArray[np.int64]
    """[E, 3] lattice offset of `second`."""
    stretch: NDArray[np.float64]
    """[E] distance over the sum of covalent radii."""


def slab_frame(
    pos: NDArray[np.float64], cell: NDArray[np.float64], pbc: NDArray[np.bool_]
) -> tuple[int, SlabFrame | None]:
    """Count the open directions, and describe the one of a slab.

    Args:
        pos: [A, 3] positions, Å.
        cell: [3, 3], rows are lattice vectors, Å.
        pbc: [3], true along periodic directions.

    Returns:
        The number of open directions (0 crystal, 1 slab, 2 or 3 chain or molecule), and for a slab its frame.
    """
    # The shortest vectors of the lattice show the vacuum whatever cell was chosen to describe it.
    basis, _ = reduced_cell(complete_cell(cell, pbc), pbc)
    reciprocal = np.linalg.inv(basis).T
    frames = []
    for axis in range(3):
        spacing = 1.0 / float(np.linalg.norm(reciprocal[axis]))
        up = reciprocal[axis] * spacing
        heights = pos @ up
        if pbc[axis]:
            heights, gap = _unwrap(heights, spacing)
            if gap < VACUUM:
                continue
        frames.append(SlabFrame(heights, up))
    if len(frames) != 1:
        return len(frames), None
    heights, up = frames[0]
    if _points_down(up, cell):
        heights, up = -heights, -up
    return 1, SlabFrame(heights, up)


def bond_reach(numbers: NDArray[np.int64]) -> float:
    """Length that no bond among atoms of these atomic numbers exceeds, Å."""
    return BOND_FACTOR * 2.0 * float(covalent_radii[numbers].max())


def find_bonds(numbers: NDArray[np.int64], neighbors: Neighbors) -> Bonds:
    """Return all pairs closer than `BOND_FACTOR` times the sum of their covalent radii.

    Args:
        numbers: [A] atomic numbers.
        neighbors: of the structure, up to `bond_reach(numbers)` at least.
    """
    radii = covalent_radii[numbers]
    near = neighbors.within(bond_reach(numbers))
    stretch = near.distances / (radii[near.receiver] + radii[near.sender])
    bonded = np.flatnonzero(stretch < BOND_FACTOR)
    return Bonds(near.receiver[bonded], near.sender[bonded], near.offsets[bonded], stretch[bonded])


def find_adsorbate(
    numbers: NDArray[np.int64], heights: NDArray[np.float64], bonds: Bonds
) -> NDArray[np.bool_]:
    """Return the mask [A] of the atoms that sit on the slab rather than belong to it, seen from above.

    1. The slab's elements are those in the lower half of the structure.
    2. A bonded group of other nonmetals is an adsorbate, unless it is buried below the slab atoms that it is
       bonded to, lies in one plane with three or more (a dopant of a sheet), or is itself a sheet, bonded
       through both in-plane directions (graphene).
    3. Nonmetal atoms of the slab's own elements join it if they are bonded to it and stick out of the slab
       (the nitrogen of NH3 on a nitride).
    4. Other metals are adatoms if they stick out and are no closed layer; else they are alloy or skin.
    5. If all that finds nothing: a top layer with at most a third of the atoms of the layer of the same
       element below it (an adatom of the slab's own metal).

    A symmetric slab with the same adsorbate on both sides shows none: its lower half holds those elements.
    """
    middle = 0.5 * (heights.min() + heights.max())
    rank = np.argsort(np.argsort(heights, kind="stable"), kind="stable")
    lower = (rank < (len(numbers) + 1) // 2) & (heights <= middle)
    in_slab = np.zeros(len(_IS_NONMETAL), dtype=bool)
    in_slab[numbers[lower]] = True
    foreign = ~in_slab[numbers]
    nonmetal = _IS_NONMETAL[numbers]

    adsorbate = np.zeros(len(numbers), dtype=bool)
    for group in _groups(foreign & ~nonmetal, bonds):
        rest = ~foreign
        sticks_out = heights[group].min() > heights[rest].max() + 0.5
        adsorbate[group] = sticks_out and not _is_sheet(group, bonds)
    slab = ~(foreign & nonmetal) & ~adsorbate
    for group in _groups(foreign & nonmetal, bonds):
        is_network = not set(numbers[group]) <= MONOVALENT and _is_sheet(group, bonds)
        adsorbate[group] = not is_network and not _is_part_of_slab(group, slab, heights, bonds)
    _grow(adsorbate, nonmetal, heights, bonds)
    if not adsorbate.any():
        adsorbate = _incomplete_top_layer(numbers, heights)
    return adsorbate


def surface_atoms(heights: NDArray[np.float64], adsorbate: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return the mask [A] of the slab atoms at most 2 Å below the highest one: the exposed layer.

    It is the height criterion of OC20, which also tags atoms with fewer neighbours than in the bulk; a file
    does not hold the bulk. The two agree for 519 of the 554 slab atoms of `datasets/oc20_sample`.
    """
    slab = ~adsorbate
    return slab & (heights > heights[slab].max() - SURFACE_DEPTH)


def _unwrap(heights: NDArray[np.float64], period: float) -> tuple[NDArray[np.float64], float]:
    """Return heights with the largest gap at the boundary, and that gap."""
    wrapped = np.sort(heights % period)
    gaps = np.diff(np.append(wrapped, wrapped[0] + period))
    widest = int(gaps.argmax())
    start = wrapped[(widest + 1) % len(wrapped)] - 0.5 * gaps[widest]
    return (heights - start) % period, float(gaps[widest])


def _points_down(up: NDArray[np.float64], cell: NDArray[np.float64]) -> bool:
    along = cell @ up
    if np.abs(along).max() > 1e-3:
        return bool(along[np.abs(along).argmax()] < 0)
    return bool(up[np.abs(up).argmax()] < 0)


def _groups(mask: NDArray[np.bool_], bonds: Bonds) -> list[NDArray[np.int64]]:
    """Return the bonded groups among the atoms of `mask`, as arrays of atom numbers."""
    if not mask.any():
        return []
    label = np.where(mask, np.arange(len(mask)), -1)
    inside = mask[bonds.first] & mask[bonds.second]
    first, second = bonds.first[inside], bonds.second[inside]
    while (label[first] != label[second]).any():
        np.minimum.at(label, first, label[second])
    return [np.flatnonzero(label == root) for root in np.unique(label[mask])]


def _is_sheet(group: NDArray[np.int64], bonds: Bonds) -> bool:
    """Whether the group is bonded to its own images in two independent directions."""
    inside = _within(bonds.first, group) & _within(bonds.second, group) & (bonds.stretch < NETWORK_FACTOR)
    if not inside.any():
        return False
    neighbors: dict[int, list[tuple[int, NDArray[np.int64]]]] = {}
    for first, second, offset in zip(
        bonds.first[inside], bonds.second[inside], bonds.offsets[inside], strict=True
    ):
        neighbors.setdefault(int(first), []).append((int(second), offset))
    cell_of = {int(group[0]): np.zeros(3, dtype=np.int64)}
    cycles, todo = [], [int(group[0])]
    while todo:
        atom = todo.pop()
        for other, offset in neighbors.get(atom, []):
            reached = cell_of[atom] + offset
            if other in cell_of:
                cycles.append(reached - cell_of[other])
            else:
                cell_of[other] = reached
                todo.append(other)
    return bool(cycles) and int(np.linalg.matrix_rank(np.array(cycles))) >= 2


def _within(atoms: NDArray[np.int64], group: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Mask of the atoms that are in the group: `np.isin`, whose sorting takes longer for an atom or two."""
    return (atoms == group[0]) if len(group) == 1 else np.isin(atoms, group)


def _is_part_of_slab(
    group: NDArray[np.int64], slab: NDArray[np.bool_], heights: NDArray[np.float64], bonds: Bonds
) -> bool:
    to_slab = _within(bonds.first, group) & slab[bonds.second]
    rise = heights[bonds.first[to_slab]] - heights[bonds.second[to_slab]]
    if not len(rise):
        return False
    return bool(rise.mean() < -BURIED or (len(rise) >= 3 and (np.abs(rise) < IN_PLANE).all()))


def _grow(
    adsorbate: NDArray[np.bool_], nonmetal: NDArray[np.bool_], heights: NDArray[np.float64], bonds: Bonds
) -> None:
    """Add bonded nonmetals that stick out of the slab, in place, until none is left."""
    while True:
        bonded = np.zeros(len(adsorbate), dtype=bool)
        bonded[bonds.second[adsorbate[bonds.first]]] = True
        bonded &= ~adsorbate
        rest = ~adsorbate & ~bonded
        if not rest.any():
            return
        joins = bonded & nonmetal & (heights > heights[rest].max() + 0.3)
        if not joins.any():
            return
        adsorbate |= joins


def _incomplete_top_layer(numbers: NDArray[np.int64], heights: NDArray[np.float64]) -> NDArray[np.bool_]:
    order = np.argsort(-heights, kind="stable")
    layer = np.empty(len(numbers), dtype=np.int64)
    layer[order] = np.cumsum(np.append(0, -np.diff(heights[order]) > 0.5))
    top = layer == 0
    for element in np.unique(numbers[top]):
        same = numbers == element
        below = layer[same & ~top]
        if not len(below) or 3 * (same & top).sum() > (below == below.min()).sum():
            return np.zeros(len(numbers), dtype=bool)
    return top
