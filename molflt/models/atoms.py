"""What the models read of a batch besides its edges, with the meaning of fields that are absent."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch_geometric.data import Batch, Data


class Atoms(NamedTuple):
    """The atoms of a batch, and what may have been added to them."""

    atomic_numbers: Tensor
    """[A] int64."""
    tags: Tensor
    """[A] int64, 0 to 2."""
    pos: Tensor
    """[A, 3] Å."""
    cell: Tensor
    """[B, 3, 3], rows are lattice vectors, Å."""
    pbc: Tensor
    """[B, 3], true along periodic directions."""
    graph: Tensor
    """[A] int64, graph of each atom."""

    @property
    def num_graphs(self) -> int:
        """B."""
        return len(self.cell)


def read_atoms(batch: Data | Batch, dtype: torch.dtype) -> Atoms:
    """The atoms of a PyG batch, or of one structure, positions and cell in the given type.

    `tags` may be absent (all 0), `batch` too (one graph), and `pbc` (periodic along every cell vector that is
    not zero).
    """
    atomic_numbers, cell = batch["atomic_numbers"], batch["cell"].to(dtype).reshape(-1, 3, 3)
    return Atoms(
        atomic_numbers=atomic_numbers,
        tags=batch["tags"] if "tags" in batch else torch.zeros_like(atomic_numbers),
        pos=batch["pos"].to(dtype),
        cell=cell,
        pbc=batch["pbc"].reshape(-1, 3) if "pbc" in batch else (cell != 0).any(-1),
        graph=batch["batch"] if "batch" in batch else torch.zeros_like(atomic_numbers),
    )


def centred(pos: Tensor, batch: Tensor, num_graphs: int) -> Tensor:
    """Positions [A, X] relative to the mean of their graph's atoms."""
    counts = torch.bincount(batch, minlength=num_graphs).clamp(min=1).unsqueeze(-1)
    mean = pos.new_zeros(num_graphs, pos.shape[-1]).index_add(0, batch, pos) / counts
    return pos - mean.index_select(0, batch)
