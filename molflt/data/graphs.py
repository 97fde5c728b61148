"""Periodic radius graphs.

Convention of OC20, which everything in molflt follows: edge e runs from the sender `edge_index[0, e]` to the
receiver `edge_index[1, e]`, and

    displacement_e = pos[sender] - pos[receiver] + cell_offsets[e] @ cell,    distances[e] = |displacement_e|,

where `cell_offsets` counts lattice vectors between the positions as they are given, wrapped or not.
Neighbours are found by `vesin` (https://luthaf.fr/vesin), which visits every real image within the radius,
however many cells away it is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
import vesin
from numpy.typing import NDArray
from torch import Tensor

from molflt.data.cells import check_cell, complete_cell, reduced_cell
from molflt.errors import InputError

SHELL_TOLERANCE = 0.01
"""Å; neighbours whose distances differ by less belong to one shell (the value fairchem uses)."""
DISTANCE_QUANTUM = 1e-6
"""Å; edges whose distances round to the same multiple of it are ordered by sender and offsets."""
MAX_WORK = 2e8
"""Edges, or visits of cells and their images, beyond which a graph is refused: seconds and gigabytes."""
_IDENTITY = np.eye(3, dtype=np.int64)
VESIN_CELLS = 90_000
"""Cells that vesin (0.6) makes at most, 100,000, with a margin."""


def radius_graph(
    pos: Tensor,
    cell: Tensor,
    pbc: Tensor,
    radius: float,
    max_neighbors: int | None = None,
    *,
    strict_cap: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Connect each atom to every atom and periodic image closer than `radius`.

    An atom is a neighbour of its own images but not of itself. Coincident atoms are neighbours at distance 0.
    Both directions of a pair are listed unless the cap removes one. Edges are sorted by receiver, then
    distance (in steps of `DISTANCE_QUANTUM`), then sender, then offsets, whatever the number of threads.

    Args:
        pos: [A, 3] positions in Å, inside the cell or not.
        cell: [3, 3] or [1, 3, 3], rows are lattice vectors in Å; left-handed and skewed cells are fine, and
            rows along open directions are ignored (they may be zero).
        pbc: [3] or [1, 3] bool, true along periodic directions.
        radius: cutoff in Å; pairs at exactly this distance are left out.
        max_neighbors: edges kept per receiver, the nearest first; None keeps all. A shell of equal distance
            (within `SHELL_TOLERANCE`) that the cap falls into is kept whole, so that a receiver may keep
            more.
        strict_cap: cut at exactly `max_neighbors`, through a shell if need be, as OC20's preprocessing
            does (radius 6, cap 50). Which members of that shell stay is arbitrary there and fixed by the
            sort order here, so the two differ in edges at the cap's distance. OC20 also counted the atom
            itself among its 50 wherever rounding hid that it was itself, and keeps 49 or 50 edges; here it
            is always 50.

    Returns:
        edge_index [2, E] int64 (sender, receiver), cell_offsets [E, 3] int64, distances [E] in Å and in the
        dtype of `pos`; all on its device. No gradient flows through the distances: use `edge_displacement`.

    Raises:
        ValueError: if `radius` is not finite and positive, or `max_neighbors` is below 1.
        InputError: if positions are not finite, the cell is not usable, or the graph would not fit in memory.
    """
    if not (math.isfinite(radius) and radius > 0):
        raise ValueError(f"radius must be finite and positive, got {radius}; give a cutoff in Å such as 6.0")
    if max_neighbors is not None and max_neighbors < 1:
        raise ValueError(f"max_neighbors must be at least 1, got {max_neighbors}; None keeps all neighbours")
    neighbors = find_neighbors(
        pos.detach().cpu().numpy().astype(np.float64),
        cell.detach().cpu().numpy().astype(np.float64).reshape(3, 3),
        pbc.detach().cpu().numpy().astype(bool).reshape(3),
        radius,
    )
    edge_index, cell_offsets, distances = neighbors.graph(radius, max_neighbors, strict_cap=strict_cap)
    return edge_index.to(pos.device), cell_offsets.to(pos.device), distances.to(pos)


@dataclass(frozen=True)
class Neighbors:
    """All pairs of a structure up to a radius, sorted as `radius_graph` says: made once, used by many."""

    num_atoms: int
    radius: float
    """Å."""
    edge_index: NDArray[np.int64]
    """[2, E] sender, receiver."""
    offsets: NDArray[np.int64]
    """[E, 3]."""
    distances: NDArray[np.float64]
    """[E] Å."""

    @property
    def sender(self) -> NDArray[np.int64]:
        """[E]."""
        return self.edge_index[0]

    @property
    def receiver(self) -> NDArray[np.int64]:
        """[E]."""
        return self.edge_index[1]

    def within(self, radius: float) -> Neighbors:
        """Those closer than a radius that is not larger than their own."""
        if radius > self.radius:
            raise ValueError(f"radius must be at most that of the neighbours, {self.radius}, got {radius}")
        if radius == self.radius:
            return self
        return self._kept(self.distances < radius, radius)

    def graph(
        self, radius: float, max_neighbors: int | None = None, *, strict_cap: bool = False
    ) -> tuple[Tensor, Tensor, Tensor]:
        """What `radius_graph` returns for a radius that is not larger, the distances in float64."""
        found = self.within(radius)
        if max_neighbors is not None:
            kept = _within_cap(found.receiver, found.distances, self.num_atoms, max_neighbors, strict_cap)
            found = found._kept(kept, radius)
        return (
            torch.from_numpy(found.edge_index),
            torch.from_numpy(found.offsets),
            torch.from_numpy(found.distances),
        )

    def _kept(self, mask: NDArray[np.bool_], radius: float) -> Neighbors:
        kept = np.flatnonzero(mask)
        columns = (self.edge_index.take(kept, axis=1), self.offsets[kept], self.distances[kept])
        return Neighbors(self.num_atoms, radius, *columns)


def find_neighbors(
    pos: NDArray[np.float64], cell: NDArray[np.float64], pbc: NDArray[np.bool_], radius: float
) -> Neighbors:
    """All pairs closer than `radius`; arguments as arrays, errors and order as in `radius_graph`."""
    pairs, shifts, half = _half_pairs(pos, cell, pbc, radius)
    # Each pair of the half list is two edges: received by the first atom, and mirrored.
    both = np.concatenate([pairs[::-1], pairs], axis=1)
    order = _edge_order(both, np.rint(half / DISTANCE_QUANTUM).astype(np.int64), shifts)
    return Neighbors(
        len(pos),
        radius,
        both.take(order, axis=1),
        np.concatenate([shifts, -shifts]).take(order, axis=0),
        np.concatenate([half, half]).take(order),
    )


def _half_pairs(
    points: NDArray[np.float64], cell: NDArray[np.float64], periodic: NDArray[np.bool_], radius: float
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]:
    """Return receiver and sender [2, E], offsets [E, 3] and distances [E] of every pair, in one direction."""
    if not np.isfinite(points).all():
        raise InputError(
            f"position of atom {int(np.flatnonzero(~np.isfinite(points).all(1))[0])} is NaN or infinite; "
            "give finite coordinates in Å"
        )
    check_cell(cell, periodic)
    # Along an open direction the box is so long that no image comes within the radius of the structure.
    extent = float(np.linalg.norm(np.ptp(points, axis=0))) if len(points) else 0.0
    box, operation = reduced_cell(
        complete_cell(cell, periodic, np.full(3, extent + 2.0 * radius + 1.0)), periodic
    )
    heights = 1.0 / np.linalg.norm(np.linalg.inv(box), axis=0)
    search_radius = _search_radius(heights, radius)
    images = np.prod(2.0 * np.ceil(search_radius / heights) + 1.0)
    density = len(points) / abs(np.linalg.det(box))
    cells = min(np.maximum(heights / search_radius, 1.0).prod(), VESIN_CELLS)
    edges = len(points) * 4.0 / 3.0 * math.pi * search_radius**3 * density
    work = max(edges, len(points) * images, cells * images)
    if work > MAX_WORK:
        raise InputError(
            f"{len(points)} atoms spread over {extent:.3g} Å in a cell {heights.round(3).tolist()} Å high "
            f"would take some {work:.0e} steps to connect; correct positions and cell or lower the radius"
        )
    # Each pair once and mirrored here is faster than vesin's full list.
    neighbors = vesin.NeighborList(cutoff=search_radius, full_list=False)
    pairs, shifts, half = neighbors.compute(points, box, True, "PSd", copy=False)
    if search_radius > radius:
        within = half < radius
        pairs, shifts, half = pairs[within], shifts[within], half[within]
    # vesin's arrays are its own memory: everything returned is a copy.
    steps = shifts.astype(np.int64)
    if (operation != _IDENTITY).any():
        steps = steps @ operation
    return np.array(pairs.T, dtype=np.int64, order="C"), steps, half.copy()


def _search_radius(heights: NDArray[np.float64], radius: float) -> float:
    """Return the smallest radius, not below `radius`, with which vesin can divide the box into cells.

    Beyond its number of cells vesin merges them alike in all directions; a direction that is left without
    any (in a vast and thin box) is divided by zero, which ends the process. Three are a safe rest.
    """
    while True:
        counts = np.maximum(np.floor(heights / radius), 1.0)
        excess = counts.prod() / VESIN_CELLS
        if excess <= 1.0 or counts.min() >= 3.0 * excess ** (1.0 / 3.0):
            return radius
        radius *= 1.2


def _edge_order(
    edge_index: NDArray[np.int64], steps: NDArray[np.int64], shifts: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return the permutation [E] that sorts edges by receiver, then steps, then sender, then offsets.

    Args:
        edge_index: [2, E] sender, receiver.
        steps: [E / 2] distances of the first half of the edges, and of the second half, not negative.
        shifts: [E / 2, 3] offsets of the first half of the edges; those of the second half are the opposite.

    All are packed into one 64-bit key, so that one fast pass does it, unless their numbers are vast.
    """
    sender, receiver = edge_index
    if not len(receiver):
        return np.arange(0)
    width = 2 * int(np.abs(shifts).max()) + 1
    bases = [int(receiver.max()) + 1, int(steps.max()) + 1, int(sender.max()) + 1, width**3]
    if math.prod(bases) >= 2**63:
        offsets = np.concatenate([shifts, -shifts]).T
        return np.lexsort([*offsets[::-1], sender, np.concatenate([steps, steps]), receiver])
    number = len(steps)
    offsets = (shifts[:, 0] * width + shifts[:, 1]) * width + shifts[:, 2]
    steps = steps * (bases[2] * bases[3])
    key = receiver * np.int64(math.prod(bases[1:])) + sender * np.int64(bases[3])
    key[:number] += steps + offsets
    key[number:] += steps - offsets
    return np.argsort(key)


def _within_cap(
    receiver: NDArray[np.int64],
    distances: NDArray[np.float64],
    num_atoms: int,
    max_neighbors: int,
    strict_cap: bool,
) -> NDArray[np.bool_]:
    """Return the mask [E] of the sorted edges that the cap keeps."""
    counts = np.bincount(receiver, minlength=num_atoms)
    first = np.cumsum(counts) - counts
    if strict_cap:
        return np.arange(len(receiver)) - first[receiver] < max_neighbors
    last = np.full(num_atoms, math.inf)
    full = counts > max_neighbors
    last[full] = distances[first[full] + max_neighbors - 1] + SHELL_TOLERANCE
    return distances <= last[receiver]
