"""Linear references: an energy per element, for total energies as targets.

    E = sum_i e[z_i] + (what the network learns)

e minimises the sum over systems of (y - sum_z n_z e[z])^2, n_z the atoms of element z in a system. Where that
leaves directions open (elements that always come in the same proportion), the shortest e is taken. Only sums
over systems are kept, A = sum n n^T and b = sum n y, in float64.
"""

from __future__ import annotations

import torch
from torch import Tensor

from molflt.models.embeddings import NUM_ELEMENTS

RANK_TOLERANCE = 1e-12
"""Eigenvalues of A below so much of the largest are rounding: A holds whole numbers, exactly."""


def reference_energies(references: Tensor, atomic_numbers: Tensor, batch: Tensor, num_graphs: int) -> Tensor:
    """[B] sums of references [119] over the atoms of each graph, eV, in float64.

    Args:
        references: energy per element by atomic number, eV.
        atomic_numbers: [A].
        batch: [A] graph of each atom.
        num_graphs: B.
    """
    per_atom = references.double().index_select(0, atomic_numbers)
    return per_atom.new_zeros(num_graphs).index_add(0, batch, per_atom)


class ReferenceFit:
    """Least squares over systems that come one at a time."""

    def __init__(self) -> None:
        self.gram = torch.zeros(NUM_ELEMENTS, NUM_ELEMENTS, dtype=torch.float64)
        self.moment = torch.zeros(NUM_ELEMENTS, dtype=torch.float64)

    def add(self, atomic_numbers: Tensor, energy: float) -> None:
        """Take in a system: its atoms [A] and its energy, eV."""
        elements, counts = atomic_numbers.unique(return_counts=True)
        counts = counts.double()
        self.gram[elements.unsqueeze(1), elements] += counts.outer(counts)
        self.moment[elements] += energy * counts

    def solve(self) -> Tensor:
        """[119] energies by atomic number, eV; 0 for elements that no system had."""
        references = torch.zeros_like(self.moment)
        present = self.gram.diagonal() > 0
        values, vectors = torch.linalg.eigh(self.gram[present][:, present])
        kept = values > RANK_TOLERANCE * values.amax()
        vectors = vectors[:, kept]
        references[present] = vectors @ (vectors.T @ self.moment[present] / values[kept])
        return references
