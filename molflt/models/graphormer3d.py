"""Graphormer-3D: from a batch of structures to relaxed energies and relaxation displacements.

Source: Shi et al., "Benchmarking Graphormer on large-scale molecular modeling datasets", arXiv 2203.04810;
with learned Fourier relative positional encodings: Choromanski et al., arXiv 2302.01925.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch_geometric.data import Batch, Data

from molflt.data.displacements import edge_displacement
from molflt.models.atoms import Atoms, centred, read_atoms
from molflt.models.embeddings import EdgeGeometry, edge_geometry
from molflt.models.encoder import EncodedPositions, Encoder
from molflt.models.heads import EnergyHead
from molflt.models.images import with_images
from molflt.models.references import reference_energies
from molflt.nn.near import NearGraph
from molflt.nn.packing import DenseLayout, dense_layout
from molflt.nn.periodic import PeriodicGeometry


class Graphormer3DOutput(NamedTuple):
    """Predictions for a batch."""

    energy: Tensor
    """[B] relaxed energy, eV."""
    delta_pos: Tensor | None
    """[A, 3] relaxed minus initial positions, Å; None without a displacement head."""


class PreparedBatch(NamedTuple):
    """A batch up to its first layer."""

    atoms: Atoms
    edges: EdgeGeometry
    gaussians: Tensor
    """[E, K] of the edges."""
    layout: DenseLayout
    """Of the atoms, images among them."""
    x: Tensor
    """[B, N, C] embedded atoms."""
    pos: Tensor
    """[B, N, 3] relative to the mean of a graph's atoms, Å."""
    encoded: EncodedPositions
    """The positions as the layers take them."""


class Graphormer3D(nn.Module):
    """Embeddings, encoder and heads, and the scales of the targets.

    The buffers `energy_mean`, `energy_std` (eV) and `delta_pos_std` (Å) turn the heads' outputs into physical
    units. They start as 0, 1, 1, are set from the training data and travel with the weights. So does
    `element_references`, where it is set (`molflt.models.references`): energies are then in float64, which
    holds a total energy and its small differences.

    Args:
        embedding: element, tag and geometry embedding.
        encoder: transformer over padded atoms.
        energy_head: node features to energies; None leaves them out, and the energies are NaN.
        displacement_head: node features to displacements; None leaves them out.
        radius: cutoff of the radius graph that the batches bring, Å.
        image_radius: images within it of an adsorbate atom take part in the attention as atoms of their own,
            Å; None adds none.
    """

    energy_mean: Tensor
    energy_std: Tensor
    delta_pos_std: Tensor
    element_references: Tensor | None
    embedding: Any
    energy_head: Any

    def __init__(
        self,
        embedding: nn.Module,
        encoder: Encoder,
        energy_head: EnergyHead | None,
        displacement_head: nn.Module | None,
        radius: float,
        image_radius: float | None = None,
    ) -> None:
        super().__init__()
        self.embedding = embedding
        self.encoder = encoder
        self.energy_head = energy_head
        self.displacement_head = displacement_head
        self.radius = radius
        self.image_radius = image_radius
        self.register_buffer("energy_mean", torch.tensor(0.0))
        self.register_buffer("energy_std", torch.tensor(1.0))
        self.register_buffer("delta_pos_std", torch.tensor(1.0))
        self.register_buffer("element_references", None)

    def energy(self, x: Tensor, atoms: Atoms) -> Tensor:
        """Energies [B], eV, from node features [A, C]."""
        if self.energy_head is None:
            return self.energy_mean.new_full((atoms.num_graphs,), float("nan"))
        # Half precision is for the encoder: errors of 0.4 % per atom would add up in the heads.
        with torch.autocast(x.device.type, enabled=False):
            energy = self.energy_head(x.to(atoms.pos.dtype), atoms.tags, atoms.graph, atoms.num_graphs)
            energy = energy * self.energy_std + self.energy_mean
        if self.element_references is None:
            return energy
        return energy + reference_energies(
            self.element_references, atoms.atomic_numbers, atoms.graph, atoms.num_graphs
        )

    def forward(self, batch: Data | Batch) -> Graphormer3DOutput:
        """Predict for a PyG batch, or for one structure.

        Args:
            batch: `atomic_numbers` [A], `pos` [A, 3] Å, `cell` [B, 3, 3] Å, `edge_index` [2, E] and
                `cell_offsets` [E, 3] of the radius graph (`transforms.RadiusGraph`); `tags` [A] may be
                absent (all 0), `batch` [A] too (one graph), and `pbc` [B, 3] (periodic along every cell
                vector that is not zero).
        """
        return self.predict(self.prepare(batch))

    def prepare(self, batch: Data | Batch) -> PreparedBatch:
        """What comes before the layers, arguments as in `forward`; of what is random, only frequencies (those
        of an RPE) have a part in it, and layers' features have none."""
        atoms, edge_index = read_atoms(batch, self.energy_mean.dtype), batch["edge_index"]
        displacement = edge_displacement(
            atoms.pos, atoms.cell, edge_index, batch["cell_offsets"], atoms.graph
        )
        edges = edge_geometry(edge_index, displacement, self.radius)
        x, gaussians = self.embedding(atoms.atomic_numbers, atoms.tags, edges)
        everyone, source = with_images(atoms, self.image_radius)
        if source is not None:
            # An image has the surroundings of its atom, hence its features.
            x = torch.cat((x, x.index_select(0, source)))
        layout = dense_layout(everyone.graph, everyone.num_graphs)
        pos = layout.pack(centred(everyone.pos, everyone.graph, everyone.num_graphs))
        geometry = None
        if self.encoder.needs_geometry:
            numbers, near = layout.pack(everyone.atomic_numbers), near_graph(edges, layout, gaussians)
            geometry = PeriodicGeometry(pos, layout.atom_mask, atoms.cell, atoms.pbc, near, numbers)
        encoded = self.encoder.encode_positions(pos, layout.atom_mask, geometry)
        return PreparedBatch(atoms, edges, gaussians, layout, layout.pack(x), pos, encoded)

    def predict(self, prepared: PreparedBatch) -> Graphormer3DOutput:
        """The layers and the heads: `forward` of the batch that was prepared."""
        atoms, edges, gaussians, layout, x, pos, encoded = prepared
        x = layout.unpack(self.encoder(x, pos, layout.atom_mask, encoded=encoded))[: len(atoms.pos)]
        delta_pos = None
        if self.displacement_head is not None:
            with torch.autocast(x.device.type, enabled=False):
                features = x.to(atoms.pos.dtype), edges, gaussians.to(atoms.pos.dtype)
                delta_pos = self.displacement_head(*features) * self.delta_pos_std
        return Graphormer3DOutput(self.energy(x, atoms), delta_pos)


def near_graph(edges: EdgeGeometry, layout: DenseLayout, gaussians: Tensor) -> NearGraph:
    """The radius graph as attention over padded atoms takes it, with the Gaussians [E, K] of its edges."""
    sender, receiver = (layout.slot.index_select(0, atom) for atom in (edges.sender, edges.receiver))
    return NearGraph(sender, receiver, edges.distances, edges.cutoff, gaussians)
