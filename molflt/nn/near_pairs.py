"""The near part of attention over all pairs of a graph's atoms: `molflt.nn.near` where most pairs are near.

    a_ij = exp(q_i.k_j / sqrt(D) + b_ij),     b_ij = log(sum_e c_e exp(f_e) + delta_ij exp(f_self))

with b_ij of minus infinity for pairs without an edge. b holds all that depends on positions, and layers that
share it are left with two matrix products. In small cells, where each atom reaches most others, that is
several times faster than to gather queries, keys and values for each edge; in large ones there is no room
for b.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from molflt.nn.near import NearGraph, ScaledSums

WORTHWHILE = 4
"""How many times the near pairs all pairs may be: to gather an edge costs several products of a pair."""


def most_pairs_are_near(graph: NearGraph, num_graphs: int, num_atoms: int) -> bool:
    """Whether all pairs of B graphs, padded to N atoms, take less time and memory than the merged edges."""
    return num_graphs * num_atoms**2 <= WORTHWHILE * len(graph.sender)


def near_pair_bias(
    graph: NearGraph,
    edge_bias: Float[Tensor, "P H"],
    self_bias: Float[Tensor, "H"],
    num_graphs: int,
    num_atoms: int,
) -> Float[Tensor, "B H N N"]:
    """b of all pairs from merged edges (`molflt.nn.near.merge_images`), one for each pair and of cutoff 1.

    Args:
        graph: the edges, at most one from one atom to another.
        edge_bias: f of the edges.
        self_bias: f of an atom with itself, added to an edge of the atom with its images.
        num_graphs, num_atoms: B and N.
    """
    pair = graph.receiver * num_atoms + graph.sender % num_atoms
    flat = edge_bias.new_full((num_graphs * num_atoms**2, edge_bias.shape[-1]), float("-inf"))
    bias = flat.index_copy(0, pair, edge_bias).view(num_graphs, num_atoms, num_atoms, -1)
    own = torch.logaddexp(bias.diagonal(dim1=1, dim2=2), self_bias.to(bias).unsqueeze(-1))
    return bias.diagonal_scatter(own, dim1=1, dim2=2).permute(0, 3, 1, 2).contiguous()


def near_pair_sums(
    query: Float[Tensor, "B H N D"],
    key: Float[Tensor, "B H N D"],
    value: Float[Tensor, "B H N D"],
    bias: Float[Tensor, "B H N N"],
) -> ScaledSums:
    """What `near_sums` returns, from `near_pair_bias`; padded rows must be finite, and get their own v."""
    logits = (query * query.shape[-1] ** -0.5) @ key.mT + bias
    largest = logits.detach().amax(-1, keepdim=True)
    weights = (logits - largest).exp()
    return ScaledSums(weights @ value, weights.sum(-1, keepdim=True), largest)
