"""Graphormer-3D: from a batch of structures to relaxed energies and relaxation displacements.

Source: Shi et al., "Benchmarking Graphormer on large-scale molecular modeling datasets", arXiv 2203.04810;
with learned Fourier relative positional encodings: Choromanski et al., arXiv 2302.01925.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch_geometric.data import Batch, Data

from molflt.data.graphs import edge_displacement
from molflt.models.embeddings import AtomEmbedding, EdgeGeometry, edge_geometry
from molflt.models.encoder import Encoder
from molflt.models.heads import DisplacementHead, EnergyHead
from molflt.nn.near import NearGraph
from molflt.nn.packing import DenseLayout, dense_layout
from molflt.nn.range_separated import PeriodicGeometry


class Graphormer3DOutput(NamedTuple):
    """Predictions for a batch."""

    energy: Tensor
    """[B] relaxed energy, eV."""
    delta_pos: Tensor | None
    """[A, 3] relaxed minus initial positions, Å; None without a displacement head."""


class Graphormer3D(nn.Module):
    """Embeddings, encoder and heads, and the scales of the targets.

    The buffers `energy_mean`, `energy_std` (eV) and `delta_pos_std` (Å) turn the heads' outputs into physical
    units. They start as 0, 1, 1, are set from the training data and travel with the weights.

    Args:
        embedding: element, tag and geometry embedding.
        encoder: transformer over padded atoms.
        energy_head: node features to energies.
        displacement_head: node features to displacements; None leaves them out.
        radius: cutoff of the radius graph that the batches bring, Å.
    """

    energy_mean: Tensor
    energy_std: Tensor
    delta_pos_std: Tensor

    def __init__(
        self,
        embedding: AtomEmbedding,
        encoder: Encoder,
        energy_head: EnergyHead,
        displacement_head: DisplacementHead | None,
        radius: float,
    ) -> None:
        super().__init__()
        self.embedding = embedding
        self.encoder = encoder
        self.energy_head = energy_head
        self.displacement_head = displacement_head
        self.radius = radius
        self.register_buffer("energy_mean", torch.tensor(0.0))
        self.register_buffer("energy_std", torch.tensor(1.0))
        self.register_buffer("delta_pos_std", torch.tensor(1.0))

    def forward(self, batch: Data | Batch) -> Graphormer3DOutput:
        """Predict for a PyG batch, or for one structure.

        Args:
            batch: `atomic_numbers` [A], `pos` [A, 3] Å, `cell` [B, 3, 3] Å, `edge_index` [2, E] and
                `cell_offsets` [E, 3] of the radius graph (`transforms.RadiusGraph`); `tags` [A] may be
                absent (all 0), `batch` [A] too (one graph), and `pbc` [B, 3] (periodic along every cell
                vector that is not zero).
        """
        pos = batch["pos"].to(self.energy_mean.dtype)
        cell = batch["cell"].to(pos.dtype).reshape(-1, 3, 3)
        atomic_numbers, edge_index = batch["atomic_numbers"], batch["edge_index"]
        num_graphs = len(cell)
        graph = batch["batch"] if "batch" in batch else torch.zeros_like(atomic_numbers)
        tags = batch["tags"] if "tags" in batch else torch.zeros_like(atomic_numbers)

        displacement = edge_displacement(pos, cell, edge_index, batch["cell_offsets"], graph)
        edges = edge_geometry(edge_index, displacement, self.radius)
        x, gaussians = self.embedding(atomic_numbers, tags, edges)

        layout = dense_layout(graph, num_graphs)
        pos_dense = layout.pack(centred(pos, graph, num_graphs))
        geometry = None
        if self.encoder.needs_geometry:
            pbc = batch["pbc"].reshape(-1, 3) if "pbc" in batch else (cell != 0).any(-1)
            numbers = layout.pack(atomic_numbers)
            near = near_graph(edges, layout, gaussians)
            geometry = PeriodicGeometry(pos_dense, layout.atom_mask, cell, pbc, near, numbers)
        x = layout.unpack(self.encoder(layout.pack(x), pos_dense, layout.atom_mask, geometry))

        energy = self.energy_head(x, tags, graph, num_graphs) * self.energy_std + self.energy_mean
        if self.displacement_head is None:
            return Graphormer3DOutput(energy, None)
        delta_pos = self.displacement_head(x, edges, gaussians) * self.delta_pos_std
        return Graphormer3DOutput(energy, delta_pos)


def near_graph(edges: EdgeGeometry, layout: DenseLayout, gaussians: Tensor) -> NearGraph:
    """The radius graph as attention over padded atoms takes it, with the Gaussians [E, K] of its edges."""
    sender, receiver = (layout.slot.index_select(0, atom) for atom in (edges.sender, edges.receiver))
    return NearGraph(sender, receiver, edges.distances, edges.cutoff, gaussians)


def centred(pos: Tensor, batch: Tensor, num_graphs: int) -> Tensor:
    """Positions [A, X] relative to the mean of their graph's atoms."""
    counts = torch.bincount(batch, minlength=num_graphs).clamp(min=1).unsqueeze(-1)
    mean = pos.new_zeros(num_graphs, pos.shape[-1]).index_add(0, batch, pos) / counts
    return pos - mean.index_select(0, batch)
