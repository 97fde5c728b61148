"""Which atoms are adsorbate, surface and subsurface, and how far that can be trusted.

OC20 tags 0 the fixed bulk-like part of a slab, 1 its surface, 2 the adsorbate. ASE's slab builders number the
same field by layer instead: 1 is the top layer, 2 the one below, and 0 the adsorbate. Most file formats drop
the field. Taking one for the other would silently exchange adsorbate and subsurface, so every structure says
where its tags come from:

- `given`: OC20 tags were in the file;
- `ase-layers`: ASE's layer numbers were in the file; tag 0 there is the adsorbate, the surface is derived;
- `derived`: neither; adsorbate and surface are found from the geometry (`molflt.data.slabs`);
- `none`: a molecule or a crystal: no tags, all atoms count.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np
from ase.data import chemical_symbols
from numpy.typing import NDArray

from molflt.data.graphs import Neighbors, find_neighbors
from molflt.data.slabs import NONMETALS, bond_reach, find_adsorbate, find_bonds, slab_frame, surface_atoms

TagSource = Literal["given", "ase-layers", "derived", "none"]
SUBSURFACE, SURFACE, ADSORBATE = 0, 1, 2


class AssignedTags(NamedTuple):
    """Tags of one structure and their provenance."""

    tags: NDArray[np.int64] | None
    """[A] in OC20's sense; None where all atoms count."""
    source: TagSource
    notes: list[str]
    """What a reader of the result should know about them, one sentence each."""


def assign_tags(
    numbers: NDArray[np.int64],
    pos: NDArray[np.float64],
    cell: NDArray[np.float64],
    pbc: NDArray[np.bool_],
    given: NDArray[np.int64] | None = None,
    neighbors: Neighbors | None = None,
) -> AssignedTags:
    """Decide on the tags of one structure.

    The same numbers can mean both conventions only where all lie in {0, 1, 2}. There the adsorbate that the
    geometry shows decides: OC20 numbers it 2, ASE 0. If the geometry shows none, the heights do: upwards
    OC20's tags rise and ASE's fall.

    Args:
        numbers: [A] atomic numbers.
        pos: [A, 3] positions, Å.
        cell: [3, 3], rows are lattice vectors, Å.
        pbc: [3], true along periodic directions.
        given: [A] what the file holds, or None. All zeros is ASE's way of saying None.
        neighbors: of the atoms, up to `slabs.bond_reach(numbers)` at least; found here without them.

    Returns:
        Tags, their source and notes.
    """
    if given is not None and not given.any():
        given = None
    open_directions, frame = slab_frame(pos, cell, pbc)
    if frame is None:
        notes = []
        if given is not None:
            kind = "crystal" if open_directions == 0 else "molecule"
            notes.append(f"tags in the file are not used: the structure is a {kind}, and all its atoms count")
        return AssignedTags(None, "none", notes)

    if neighbors is None:
        neighbors = find_neighbors(pos, cell, pbc, bond_reach(numbers))
    bonds = find_bonds(numbers, neighbors)
    heights = frame.heights
    adsorbate = find_adsorbate(numbers, heights, bonds)
    if not adsorbate.any():
        from_below = find_adsorbate(numbers, -heights, bonds)
        if from_below.any():
            adsorbate, heights = from_below, -heights

    convention = "absent" if given is None else tag_convention(given, heights, adsorbate)
    if given is not None and convention == "oc20":
        return AssignedTags(given.astype(np.int64), "given", [])
    if given is not None and convention == "ase-layers":
        falls = _mean_heights(given, heights)
        upwards = heights if falls[0] >= falls[-1] else -heights
        tags = _slab_tags(upwards, given == 0)
        note = f"tags in the file are ASE's layer numbers; {_described(tags, numbers)}"
        return AssignedTags(tags, "ase-layers", [note])
    tags = _slab_tags(heights, adsorbate)
    notes = [f"tags derived from the geometry: {_described(tags, numbers)}"]
    if not adsorbate.any() and (symbols := on_both_sides(numbers, heights)):
        notes.append(
            f"{', '.join(symbols)} on both sides of the slab is not taken for an adsorbate; give OC20 tags "
            "if it is one"
        )
    if given is not None:
        notes.append("tags in the file are neither OC20's nor ASE's layer numbers and not used")
    return AssignedTags(tags, "derived", notes)


def on_both_sides(numbers: NDArray[np.int64], heights: NDArray[np.float64]) -> list[str]:
    """Symbols of the nonmetals that cover a slab from above and below and are not within it."""
    depth = np.minimum(heights - heights.min(), heights.max() - heights) / max(np.ptp(heights), 1e-9)
    is_above = heights > heights.mean()
    found = []
    for number in np.unique(numbers):
        own = numbers == number
        if number in NONMETALS and (depth[own] < 0.25).all() and len({*is_above[own].tolist()}) == 2:
            found.append(chemical_symbols[number])
    return found


def tag_convention(
    given: NDArray[np.int64], heights: NDArray[np.float64], adsorbate: NDArray[np.bool_]
) -> Literal["oc20", "ase-layers", "unknown"]:
    """Tell OC20's tags from ASE's layer numbers and from labels of a user's own.

    Args:
        given: [A] what the file holds.
        heights: [A] along the open direction, Å, adsorbate side up as far as it is known.
        adsorbate: [A] mask that the geometry shows; may be empty.

    Returns:
        "oc20": only 0, 1 and 2, and 2 is the adsorbate. "ase-layers": 1, 2, ... n without gaps, each layer
        below the one before, and 0, if there, the adsorbate on top. "unknown": neither.
    """
    values = np.unique(given)
    means = _mean_heights(given, heights)
    steps = np.diff(means)
    may_be_oc20 = len(values) > 1 and values[-1] == 2 and values[0] >= 0
    is_counted = values[0] in (0, 1) and values[-1] - values[0] == len(values) - 1
    may_be_layers = is_counted and ((steps < 0).all() or (steps > 0).all())
    if adsorbate.any():
        found = given[adsorbate]
        is_tagged_0 = 2 * (found == 0).sum() > len(found)
        is_tagged_2 = 2 * (found == 2).sum() > len(found)
        # What the geometry takes for the adsorbate may be surface oxide too: rising tags are OC20's as well.
        may_be_oc20 &= is_tagged_2 or (bool((steps > 0).all()) and not is_tagged_0)
        may_be_layers &= is_tagged_0
    elif may_be_oc20 and may_be_layers:
        may_be_oc20, may_be_layers = steps[0] > 0, steps[0] < 0
    elif len(values) == 2 and values[0] == 0:
        may_be_layers = may_be_layers and steps[0] < 0
    if may_be_oc20:
        return "oc20"
    return "ase-layers" if may_be_layers else "unknown"


def _mean_heights(given: NDArray[np.int64], heights: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the mean height of the atoms of each tag, by rising tag."""
    return np.array([heights[given == value].mean() for value in np.unique(given)])


def _slab_tags(heights: NDArray[np.float64], adsorbate: NDArray[np.bool_]) -> NDArray[np.int64]:
    tags = np.full(len(heights), SUBSURFACE, dtype=np.int64)
    tags[surface_atoms(heights, adsorbate)] = SURFACE
    tags[adsorbate] = ADSORBATE
    return tags


def _described(tags: NDArray[np.int64], numbers: NDArray[np.int64]) -> str:
    atoms = np.flatnonzero(tags == ADSORBATE)
    places = ", ".join(str(atom) for atom in atoms[:12])
    symbols = ", ".join(chemical_symbols[numbers[atom]] for atom in atoms[:12])
    more = f" and {len(atoms) - 12} more" if len(atoms) > 12 else ""
    word = "atom" if len(atoms) == 1 else "atoms"
    adsorbate = f"adsorbate: {word} {places} ({symbols}){more}" if len(atoms) else "no adsorbate"
    return f"{adsorbate}; {(tags == SURFACE).sum()} surface atoms, {(tags == SUBSURFACE).sum()} below"
