"""Displacements in periodic structures: the minimum image, and what an edge spans.

Conventions are those of `molflt.data.graphs`.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from molflt.data.cells import check_cell, complete_cell, reduced_cell

CERTAIN = 0.49
"""Of the shortest lattice vector: less than half by more than a cell that counts as reduced may err."""


def minimum_image(displacement: Tensor, cell: Tensor, pbc: Tensor) -> Tensor:
    """Return the shortest of all periodic images of each displacement.

    Exact for any cell: the search runs over the neighbouring images in the Minkowski-reduced basis, not by
    rounding fractional coordinates of the given one. Where two images are equally short, which one is
    returned is decided by rounding.

    Args:
        displacement: [..., 3] in Å.
        cell: [3, 3] or [1, 3, 3], rows are lattice vectors in Å.
        pbc: [3] or [1, 3] bool, true along periodic directions.

    Returns:
        [..., 3], `displacement` plus a lattice vector, in its dtype.

    Raises:
        InputError: if the cell is not usable along a periodic direction.
    """
    periodic = pbc.detach().cpu().numpy().astype(bool).reshape(3)
    cell_rows = cell.detach().cpu().numpy().astype(np.float64).reshape(3, 3)
    check_cell(cell_rows, periodic)
    if not periodic.any():
        return displacement
    reduced = reduced_cell(complete_cell(cell_rows, periodic), periodic)[0]
    # A vector shorter than half of every lattice vector, as nearly all steps of a relaxation are, is its own.
    certain = CERTAIN * float(np.linalg.norm(reduced[periodic], axis=1).min())
    far = ~(displacement.square().sum(-1) < certain**2)
    if not far.any():
        return displacement
    basis = torch.from_numpy(reduced).to(displacement.device)
    flags = torch.from_numpy(periodic).to(basis)
    vectors = displacement[far].double()
    nearest = -torch.round(torch.linalg.solve(basis.T, vectors.T).T * flags)
    steps = torch.cartesian_prod(*[torch.tensor([0.0, -1.0, 1.0], device=basis.device)] * 3).double() * flags
    images = nearest.unsqueeze(1) + torch.unique(steps, dim=0)
    candidates = vectors.unsqueeze(1) + images @ basis
    shortest = candidates.square().sum(-1).argmin(-1)
    found = displacement.clone()
    found[far] = candidates[torch.arange(len(candidates)), shortest].to(displacement)
    return found


def edge_displacement(
    pos: Tensor, cell: Tensor, edge_index: Tensor, cell_offsets: Tensor, batch: Tensor | None = None
) -> Tensor:
    """Return r_sender - r_receiver of each edge, with the periodic image that it reaches.

    displacement_e = pos[edge_index[0, e]] - pos[edge_index[1, e]] + cell_offsets[e] @ cell[batch]

    Args:
        pos: [A, 3] positions in Å; gradients flow to it and to `cell`.
        cell: [B, 3, 3], rows are lattice vectors in Å.
        edge_index: [2, E] sender, receiver.
        cell_offsets: [E, 3] integer lattice offsets.
        batch: [A] graph of each atom; None for a single graph.

    Returns:
        [E, 3] in Å.
    """
    sender, receiver = edge_index
    offsets = cell_offsets.to(pos.dtype)
    if batch is None:
        shift = offsets @ cell.reshape(3, 3)
    else:
        shift = torch.einsum("ek,ekx->ex", offsets, cell.reshape(-1, 3, 3)[batch[receiver]])
    return pos[sender] - pos[receiver] + shift
