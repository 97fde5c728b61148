"""From node features to a relaxed energy and to the displacements of relaxation.

    energy      = sum over counted atoms of scale[t_i] MLP(h_i)
    delta_pos_i = sum_h sum_e a_eh s_jh u_e
    a_eh        = c(d_e) exp(l_eh) / (exp(l_ih) + sum_e' c(d_e') exp(l_e'h))

with the logits l_eh = q_ih.k_jh / sqrt(D) + Linear_h(G_e), l_ih = q_ih.k_ih / sqrt(D) of an atom with itself,
u_e the unit vector from receiver i to sender j, and s_jh a learned scalar of the sender for each head.

Source: Graphormer-3D (Shi et al., arXiv 2203.04810). Its node head maps x, y and z by three matrices of
their own and runs over all pairs; one scalar map for the three makes it turn with the structure, and the
radius graph with its smooth cutoff makes it linear in the atoms and periodic.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from molflt.models.embeddings import NUM_TAGS, EdgeGeometry, sum_to_receivers


def counted_atoms(tags: Tensor, batch: Tensor, num_graphs: int) -> Tensor:
    """Mask [A] of the atoms whose contributions make the energy.

    Those with tag > 0 (surface and adsorbate); in a graph that has none, all of its atoms.
    """
    tagged = tags > 0
    graph_is_tagged = torch.zeros(num_graphs, dtype=torch.int64, device=tags.device)
    graph_is_tagged = graph_is_tagged.index_add(0, batch, tagged.to(torch.int64)) > 0
    return tagged | ~graph_is_tagged.index_select(0, batch)


def attention_over_edges(logits: Tensor, self_logits: Tensor, edges: EdgeGeometry) -> Tensor:
    """Softmax of each atom over its edges and itself, the edges weighted by their cutoff.

    The atom's own share has no cutoff, so the weights of an atom whose last edge vanishes go to zero instead
    of staying at one until it is gone.

    Args:
        logits: [E, H].
        self_logits: [A, H].
        edges: the radius graph.

    Returns:
        [E, H]; together with the atom's own share they sum to one over the edges of a receiver.
    """
    index = edges.receiver.unsqueeze(-1).expand_as(logits)
    largest = self_logits.detach().scatter_reduce(0, index, logits.detach(), "amax")
    weights = edges.cutoff.unsqueeze(-1) * (logits - largest.index_select(0, edges.receiver)).exp()
    total = (self_logits - largest).exp() + sum_to_receivers(weights, edges.receiver, len(self_logits))
    return weights / total.index_select(0, edges.receiver)


class EnergyHead(nn.Module):
    """Sum over the counted atoms of an MLP of their features, scaled per tag.

    Args:
        channels: C.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(channels, channels), nn.GELU(), nn.Linear(channels, 1))
        self.tag_scale = nn.Embedding(NUM_TAGS, 1)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for layer in self.mlp:
            if isinstance(layer, nn.Linear):
                layer.reset_parameters()
        nn.init.ones_(self.tag_scale.weight)

    def forward(self, x: Tensor, tags: Tensor, batch: Tensor, num_graphs: int) -> Tensor:
        """Energies [B] in units of the target's standard deviation.

        Args:
            x: [A, C] node features.
            tags: [A] int64, 0 to 2.
            batch: [A] graph of each atom.
            num_graphs: B.
        """
        per_atom = (self.mlp(x) * self.tag_scale(tags)).squeeze(-1)
        # Sums of many atoms lose too much in half precision, which autocast may have chosen.
        per_atom = per_atom.to(torch.promote_types(per_atom.dtype, torch.float32))
        per_atom = per_atom * counted_atoms(tags, batch, num_graphs)
        return per_atom.new_zeros(num_graphs).index_add(0, batch, per_atom)


class DisplacementHead(nn.Module):
    """A vector per atom that turns with the structure: attention weights times unit vectors of the edges.

    Args:
        channels: C.
        num_heads: H.
        num_gaussians: K of the edges' Gaussians.
        attention_channels: width of queries and keys over all heads, H D; C as published. The logits take
            E x attention_channels numbers, so a narrow one is what makes this head cheap.
    """

    def __init__(
        self, channels: int, num_heads: int, num_gaussians: int, attention_channels: int | None = None
    ) -> None:
        super().__init__()
        attention_channels = channels if attention_channels is None else attention_channels
        if attention_channels % num_heads:
            raise ValueError(
                "attention_channels must be divisible by num_heads, got "
                f"attention_channels={attention_channels} and num_heads={num_heads}"
            )
        self.num_heads = num_heads
        self.query = nn.Linear(channels, attention_channels)
        self.key = nn.Linear(channels, attention_channels)
        self.edge_bias = nn.Linear(num_gaussians, num_heads)
        self.value = nn.Linear(channels, num_heads)

    def reset_parameters(self) -> None:
        for layer in (self.query, self.key, self.edge_bias, self.value):
            layer.reset_parameters()

    def forward(self, x: Tensor, edges: EdgeGeometry, gaussians: Tensor) -> Tensor:
        """Displacements [A, 3] in units of the target's standard deviation.

        An edge of zero length has no direction and adds nothing but its share of the weights.

        Args:
            x: [A, C] node features.
            edges: the radius graph.
            gaussians: [E, K] of the edges, weighted by the cutoff.
        """
        query = self.query(x).unflatten(-1, (self.num_heads, -1))
        key = self.key(x).unflatten(-1, (self.num_heads, -1))
        query = query / math.sqrt(query.shape[-1])
        logits = (query.index_select(0, edges.receiver) * key.index_select(0, edges.sender)).sum(-1)
        weights = attention_over_edges(logits + self.edge_bias(gaussians), (query * key).sum(-1), edges)
        along = (weights * self.value(x).index_select(0, edges.sender)).sum(-1, keepdim=True)
        unit = edges.displacement / torch.where(edges.distances > 0, edges.distances, 1.0).unsqueeze(-1)
        return sum_to_receivers(along * unit, edges.receiver, len(x))

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}"
