"""Periodic images as atoms of their own, the way Graphormer-3D makes a periodic structure finite.

Attention over the atoms and their images near the adsorbate sees neighbours across the cell's border, at the
price of more atoms and of a border further out. Graphormer-3D takes images one cell away along a and b and
within 8 Å of an adsorbate atom (arXiv 2203.04810); a small cell needs images further away, and here all
within the radius are found.
"""

from __future__ import annotations

import torch
from torch import Tensor

from molflt.data.graphs import radius_graph
from molflt.models.atoms import Atoms

ADSORBATE = 2
"""OC20's tag."""


def image_atoms(atoms: Atoms, radius: float) -> tuple[Tensor, Tensor]:
    """All images within a radius (Å) of any adsorbate atom, or of any atom in a structure without one.

    Returns:
        The atom that each is an image of [I], and the lattice vector between them [I, 3], Å; gradients flow
        to the cell.
    """
    sources: list[Tensor] = []
    shifts: list[Tensor] = []
    for index, (cell, pbc) in enumerate(zip(atoms.cell, atoms.pbc, strict=True)):
        members = (atoms.graph == index).nonzero().squeeze(-1)
        edge_index, offsets, _ = radius_graph(atoms.pos[members], cell, pbc, radius)
        centre = atoms.tags[members] == ADSORBATE
        if not bool(centre.any()):
            centre = torch.ones_like(centre)
        reached = centre[edge_index[1]] & (offsets != 0).any(-1)
        found = torch.unique(torch.cat((edge_index[:1].T, offsets), dim=-1)[reached], dim=0)
        sources.append(members[found[:, 0]])
        shifts.append(found[:, 1:].to(cell.dtype) @ cell)
    return torch.cat(sources), torch.cat(shifts)


def with_images(atoms: Atoms, radius: float | None) -> tuple[Atoms, Tensor | None]:
    """The atoms followed by their images within the radius, and the atom [I] that each is an image of.

    Without a radius the atoms as they are, and None.
    """
    if radius is None:
        return atoms, None
    source, shift = image_atoms(atoms, radius)
    numbers, tags, graph, images = (
        torch.cat((field, field.index_select(0, source)))
        for field in (atoms.atomic_numbers, atoms.tags, atoms.graph, atoms.pos)
    )
    pos = torch.cat((images[: len(atoms.pos)], images[len(atoms.pos) :] + shift))
    return atoms._replace(atomic_numbers=numbers, tags=tags, pos=pos, graph=graph), source
