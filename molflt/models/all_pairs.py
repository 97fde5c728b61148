"""Graphormer-3D as published: Gaussians of all pairs of atoms, in the embedding and as attention bias.

    x_ij   = mul[z_i, z_j] d_ij + bias[z_i, z_j]
    G_ijk  = exp(-(x_ij - mu_k)^2 / 2 sigma_k^2) / (sqrt(2 pi) sigma_k)
    h_i    = element[z_i] + tag[t_i] + Linear(sum_j G_ij)
    a_ij   ~ exp(q_i.k_j / sqrt(D) + MLP(G_ij))                           the same bias in every layer
    energy = sum over counted atoms of scale[t_i] MLP(h_i)
    delta_pos_ix = w_x . sum_h sum_j a'_ij u_ijx v_j                      x: one of three directions

An atom is a pair with itself, at distance 0. Periodicity enters by image atoms alone
(`molflt.models.images`). Cost and memory are quadratic in the atoms. The three maps w_x of the Δpos head
differ, as published, so it does not turn with the structure. This is the reference that the linear model is
measured against.

Source: Shi et al., arXiv 2203.04810, and the code beside it (microsoft/Graphormer, graphormer_3d.py).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.data import Batch, Data

from molflt.models.atoms import Atoms, read_atoms
from molflt.models.embeddings import NUM_ELEMENTS, NUM_TAGS
from molflt.models.encoder import Encoder
from molflt.models.graphormer3d import Graphormer3D, Graphormer3DOutput
from molflt.models.heads import EnergyHead
from molflt.models.images import with_images
from molflt.nn.multihead import zero_padding
from molflt.nn.packing import DenseLayout, dense_layout
from molflt.nn.softmax import SoftmaxAttention

STD_FLOOR = 1e-2
"""Å, added to |std| as published."""
LARGEST_INITIAL = 3.0
"""Å; means and widths start uniform below it, as published."""
NO_BIAS = -1e30
"""At padded keys: a row of nothing else is a uniform average and no NaN."""


class PairGeometry(NamedTuple):
    """All pairs of a padded batch."""

    unit: Tensor
    """[B, N, N, 3] from i to j, 0 for an atom with itself."""
    bias: Tensor
    """[B, H, N, N], added to the logits; `NO_BIAS` at padded j."""


class AllPairsEmbedding(nn.Module):
    """Node features and attention bias from the Gaussians of all pairs.

    Args:
        channels: C.
        num_heads: H.
        num_gaussians: K.
    """

    def __init__(self, channels: int, num_heads: int, num_gaussians: int) -> None:
        super().__init__()
        self.element = nn.Embedding(NUM_ELEMENTS, channels)
        self.tag = nn.Embedding(NUM_TAGS, channels)
        self.pair_mul = nn.Embedding(NUM_ELEMENTS**2, 1)
        self.pair_bias = nn.Embedding(NUM_ELEMENTS**2, 1)
        self.means = nn.Parameter(torch.empty(num_gaussians))
        self.stds = nn.Parameter(torch.empty(num_gaussians))
        self.geometry = nn.Linear(num_gaussians, channels)
        self.attention_bias = nn.Sequential(
            nn.Linear(num_gaussians, num_gaussians), nn.GELU(), nn.Linear(num_gaussians, num_heads)
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for module in self.children():
            for layer in module if isinstance(module, nn.Sequential) else (module,):
                if isinstance(layer, nn.Linear | nn.Embedding):
                    layer.reset_parameters()
        nn.init.ones_(self.pair_mul.weight)
        nn.init.zeros_(self.pair_bias.weight)
        nn.init.uniform_(self.means, 0.0, LARGEST_INITIAL)
        nn.init.uniform_(self.stds, 0.0, LARGEST_INITIAL)

    def gaussians(self, distances: Tensor, atomic_numbers: Tensor) -> Tensor:
        """G [B, N, N, K] of distances [B, N, N], Å, and elements [B, N]; in float32 at least."""
        pair = atomic_numbers.unsqueeze(2) * NUM_ELEMENTS + atomic_numbers.unsqueeze(1)
        with torch.autocast(distances.device.type, enabled=False):
            x = self.pair_mul(pair) * distances.unsqueeze(-1) + self.pair_bias(pair)
            stds = self.stds.abs() + STD_FLOOR
            return (-0.5 * ((x - self.means) / stds).square()).exp() / (math.sqrt(2 * math.pi) * stds)

    def forward(
        self, atomic_numbers: Tensor, tags: Tensor, pos: Tensor, atom_mask: Tensor
    ) -> tuple[Tensor, PairGeometry]:
        """Node features [B, N, C] and the pairs.

        Args:
            atomic_numbers, tags: [B, N] int64, 0 at padding.
            pos: [B, N, 3] Å.
            atom_mask: [B, N], true at real atoms.
        """
        displacement = pos.unsqueeze(1) - pos.unsqueeze(2)
        squared = displacement.square().sum(-1)
        apart = squared > 0
        distances = torch.where(apart, torch.where(apart, squared, 1.0).sqrt(), 0.0)
        gaussians = self.gaussians(distances, atomic_numbers)
        summed = (gaussians * atom_mask[:, None, :, None]).sum(2)
        x = self.element(atomic_numbers) + self.tag(tags) + self.geometry(summed)
        bias = self.attention_bias(gaussians).permute(0, 3, 1, 2)
        # Half precision, which autocast may have chosen, does not hold `NO_BIAS`.
        bias = bias.to(torch.promote_types(bias.dtype, torch.float32))
        bias = bias.masked_fill(~atom_mask[:, None, None, :], NO_BIAS)
        # The published code divides by d + 1e-5.
        unit = displacement / torch.where(apart, distances, 1.0).unsqueeze(-1)
        return zero_padding(x, atom_mask), PairGeometry(unit, bias)


class PairBiasAttention(SoftmaxAttention):
    """Softmax attention with a bias that the embedding made.

    Args:
        channels: C.
        num_heads: H.
        attention_dropout: probability, of the weights.
    """

    needs_geometry = True
    """Whether `encode_positions` takes the pairs instead of positions."""

    def __init__(self, channels: int, num_heads: int, attention_dropout: float = 0.0) -> None:
        super().__init__(channels, num_heads, use_rpe=False)
        self.attention_dropout = attention_dropout

    def encode_positions(self, geometry: PairGeometry) -> Tensor:  # type: ignore[override]
        """The bias [B, H, N, N]."""
        return geometry.bias

    def forward(  # type: ignore[override]
        self, x: Tensor, pos: Tensor | None, atom_mask: Tensor, *, positional: Tensor
    ) -> Tensor:
        """x [B, N, C] to [B, N, C]."""
        query, key, value = self.heads(zero_padding(x, atom_mask))
        dropout = self.attention_dropout if self.training else 0.0
        bias = positional.to(query.dtype)
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=bias, dropout_p=dropout)
        return self.merge(out, atom_mask)


class AllPairsDisplacementHead(nn.Module):
    """Attention weights times unit vectors over all pairs, with a map of its own for x, y and z.

    Args:
        channels: C.
        num_heads: H.
        attention_channels: width of queries and keys over all heads; C as published.
        attention_dropout: probability, of the weights.
    """

    def __init__(
        self, channels: int, num_heads: int, attention_channels: int, attention_dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.query = nn.Linear(channels, attention_channels)
        self.key = nn.Linear(channels, attention_channels)
        self.value = nn.Linear(channels, channels)
        self.axes = nn.Linear(channels, 3)
        self.dropout = nn.Dropout(attention_dropout)

    def reset_parameters(self) -> None:
        for layer in (self.query, self.key, self.value, self.axes):
            layer.reset_parameters()

    def forward(self, x: Tensor, pairs: PairGeometry) -> Tensor:
        """Displacements [B, N, 3] in units of the target's standard deviation, from x [B, N, C]."""
        query, key, value = (
            layer(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        logits = query @ key.mT / math.sqrt(query.shape[-1]) + pairs.bias
        weights = self.dropout(logits.softmax(-1))
        along = [weights * pairs.unit[:, None, :, :, axis] @ value for axis in range(3)]
        vectors = torch.stack([part.transpose(1, 2).flatten(-2) for part in along], dim=2)
        return torch.einsum("bnxc,xc->bnx", vectors, self.axes.weight) + self.axes.bias


class PreparedPairs(NamedTuple):
    """A batch up to its first layer."""

    atoms: Atoms
    layout: DenseLayout
    """Of the atoms, images among them."""
    x: Tensor
    """[B, N, C] embedded atoms."""
    pairs: PairGeometry


class AllPairsGraphormer3D(Graphormer3D):
    """The published model, with the contract of `Graphormer3D`: it takes no notice of a batch's edges.

    Args:
        embedding: node features and pairs.
        encoder: layers with `PairBiasAttention`.
        energy_head: node features to energies.
        displacement_head: node features and pairs to displacements; None leaves them out.
        image_radius: images within it of an adsorbate atom are atoms of their own, Å; None adds none, so that
            the structure is an open one.
    """

    embedding: AllPairsEmbedding

    def __init__(
        self,
        embedding: AllPairsEmbedding,
        encoder: Encoder,
        energy_head: EnergyHead | None,
        displacement_head: AllPairsDisplacementHead | None,
        image_radius: float | None,
    ) -> None:
        super().__init__(embedding, encoder, energy_head, displacement_head, 0.0, image_radius)

    def prepare(self, batch: Data | Batch) -> PreparedPairs:  # type: ignore[override]
        """What comes before the layers; arguments as in `Graphormer3D.forward`."""
        atoms = read_atoms(batch, self.energy_mean.dtype)
        everyone, _ = with_images(atoms, self.image_radius)
        layout = dense_layout(everyone.graph, everyone.num_graphs)
        fields = (everyone.atomic_numbers, everyone.tags, everyone.pos)
        return PreparedPairs(atoms, layout, *self.embedding(*map(layout.pack, fields), layout.atom_mask))

    def predict(self, prepared: PreparedPairs) -> Graphormer3DOutput:  # type: ignore[override]
        """The layers and the heads."""
        atoms, layout, x, pairs = prepared
        own = len(atoms.pos)
        x = self.encoder(x, None, layout.atom_mask, pairs)
        delta_pos = None
        if self.displacement_head is not None:
            with torch.autocast(x.device.type, enabled=False):
                dense = self.displacement_head(x.to(atoms.pos.dtype), pairs)
            delta_pos = layout.unpack(dense)[:own] * self.delta_pos_std
        return Graphormer3DOutput(self.energy(layout.unpack(x)[:own], atoms), delta_pos)
