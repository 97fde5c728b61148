"""The near part of attention: exact, over the edges of a periodic radius graph and each atom with itself.

    a_ij = sum_e c_e exp(q_i.k_j / sqrt(D) + f_e)  +  delta_ij exp(q_i.k_i / sqrt(D) + f_self)

summed over the edges e from sender j to receiver i: several where several images of j are near, and edges of
an atom with its own images among them. c_e is a smooth cutoff that is 0 at the graph's radius, so nothing
jumps when an edge vanishes; an atom with itself has c = 1. The cost is linear in the edges.

Sums are kept as (numerator, normaliser, log scale), standing for the first two times exp(log scale). The
scale is the largest log weight of the row: nothing overflows, and sums of different parts can be added.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from molflt.nn.functional import recomputed

SMALLEST_CUTOFF = 1e-30
"""Edges of a smaller weight count as none: its logarithm must be finite."""
SMALLEST_NORMALIZER = 1e-30
"""Sums of weights below it, or rounded to a negative number, count as no weights."""
LOWEST_LOG_SCALE = -1e30
RECOMPUTED_ELEMENTS = 2**24
"""Edges times channels above which what is gathered per edge is formed again in the backward pass."""


@dataclass(frozen=True)
class NearGraph:
    """Edges of a padded batch, both directions of each pair, real atoms only.

    Attributes:
        sender, receiver: rows b N + n of the padded atoms (`DenseLayout.slot` of the ragged ones), `[E]`.
        distances: |r_sender - r_receiver| with the image that the edge reaches, `[E]`, Å.
        cutoff: c, `[E]`, not negative.
        features: what else is known of the edges, `[E, K]`, such as element-pair Gaussians.
    """

    sender: Int[Tensor, "E"]
    receiver: Int[Tensor, "E"]
    distances: Float[Tensor, "E"]
    cutoff: Float[Tensor, "E"]
    features: Float[Tensor, "E K"] | None = None


class ScaledSums(NamedTuple):
    """sum_j a_ij v_j and sum_j a_ij, both divided by exp(log_scale)."""

    numerator: Tensor
    """`[B, H, N, D]`."""
    normalizer: Tensor
    """`[B, H, N, 1]`."""
    log_scale: Tensor
    """`[B, H, N, 1]`."""

    def quotient(self) -> Float[Tensor, "B H N D"]:
        """Attention by these weights alone; 0 in rows without any."""
        counted = self.normalizer > SMALLEST_NORMALIZER
        return torch.where(counted, self.numerator / torch.where(counted, self.normalizer, 1.0), 0.0)

    def add(self, other: ScaledSums) -> ScaledSums:
        """Sums over the weights of both, on the scale of the larger normaliser."""
        largest = torch.maximum(self.log_normalizer(), other.log_normalizer())
        ours, theirs = (part.counted_scale().sub(largest).exp() for part in (self, other))
        return ScaledSums(
            ours * self.numerator + theirs * other.numerator,
            ours * self.normalizer + theirs * other.normalizer,
            largest,
        )

    def log_normalizer(self) -> Float[Tensor, "B H N 1"]:
        """log sum_j a_ij, without gradient; a very low number where there are no weights."""
        normalizer = self.normalizer.detach()
        counted = normalizer > SMALLEST_NORMALIZER
        log = torch.where(counted, normalizer, 1.0).log() + self.log_scale.detach()
        return log.masked_fill(~counted, LOWEST_LOG_SCALE)

    def counted_scale(self) -> Float[Tensor, "B H N 1"]:
        """`log_scale`, so low that nothing is left where there are no weights."""
        return self.log_scale.masked_fill(self.normalizer.detach() <= SMALLEST_NORMALIZER, LOWEST_LOG_SCALE)


class NearBias(nn.Module):
    """f of edges, one per head; base class.

    Args:
        num_heads: H.
    """

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads

    def reset_parameters(self) -> None:
        """Initial parameters."""
        raise NotImplementedError(f"{type(self).__name__} must define reset_parameters")

    def self_bias(self) -> Float[Tensor, "H"]:
        """f of an atom with itself."""
        raise NotImplementedError(f"{type(self).__name__} must define self_bias")

    def forward(self, graph: NearGraph) -> Float[Tensor, "E H"]:
        """f of each edge."""
        raise NotImplementedError(f"{type(self).__name__} must define forward")


class RadialNearBias(NearBias):
    """f(d) = sum_t w_t exp(-(d - mu_t)^2 / 2 sigma^2), mu_t from 0 to the radius in steps of sigma.

    f_self = f(0). Amplitudes start as N(0, 1/2), which gives f about unit variance.

    Args:
        num_heads: H.
        radius: of the graph, Å.
        num_basis: T, at least 2.
    """

    means: Tensor

    def __init__(self, num_heads: int, radius: float, num_basis: int = 16) -> None:
        super().__init__(num_heads)
        if not radius > 0 or num_basis < 2:
            raise ValueError(
                f"radius must be positive and num_basis at least 2, got {radius} and {num_basis}"
            )
        self.radius = radius
        self.register_buffer("means", torch.linspace(0, radius, num_basis))
        self.amplitude = nn.Parameter(torch.empty(num_basis, num_heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.amplitude, std=0.5**0.5)

    def at(self, distances: Float[Tensor, "E"]) -> Float[Tensor, "E H"]:
        """f at any distances, Å."""
        spacing = self.radius / (len(self.means) - 1)
        scaled = (distances.to(self.means.dtype).unsqueeze(-1) - self.means) / spacing
        return (-0.5 * scaled.square()).exp() @ self.amplitude

    def self_bias(self) -> Float[Tensor, "H"]:
        return self.at(self.means.new_zeros(1)).squeeze(0)

    def forward(self, graph: NearGraph) -> Float[Tensor, "E H"]:
        return self.at(graph.distances)

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, radius={self.radius}, num_basis={len(self.means)}"


class EdgeFeatureNearBias(NearBias):
    """f = Linear(features) of edges that bring features, such as Graphormer-3D's element-pair Gaussians.

    Args:
        num_heads: H.
        num_features: K.
    """

    def __init__(self, num_heads: int, num_features: int) -> None:
        super().__init__(num_heads)
        self.linear = nn.Linear(num_features, num_heads)
        self.own = nn.Parameter(torch.empty(num_heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.linear.reset_parameters()
        nn.init.zeros_(self.own)

    def self_bias(self) -> Float[Tensor, "H"]:
        return self.own

    def forward(self, graph: NearGraph) -> Float[Tensor, "E H"]:
        if graph.features is None:
            raise ValueError(
                "EdgeFeatureNearBias needs NearGraph.features, got None: pass them, or use RadialNearBias"
            )
        return self.linear(graph.features.to(self.linear.weight.dtype))


def merge_images(graph: NearGraph, edge_bias: Float[Tensor, "E H"]) -> tuple[NearGraph, Float[Tensor, "P H"]]:
    """One edge for each pair of atoms, whose weight is the sum over the images that the edges reach.

    Its bias is log sum_e c_e exp(f_e), its cutoff 1 and its distance that of the nearest image. In a cell
    smaller than the radius this leaves a fraction of the edges for the layers to visit. Edges whose cutoff is
    0 are left out.

    Args:
        graph: the edges.
        edge_bias: f of the edges.
    """
    counted = (graph.cutoff > SMALLEST_CUTOFF).nonzero().squeeze(-1)
    sender, receiver, distances, cutoff = (
        x.index_select(0, counted) for x in (graph.sender, graph.receiver, graph.distances, graph.cutoff)
    )
    log_weight = edge_bias.index_select(0, counted) + cutoff.log().to(edge_bias.dtype).unsqueeze(-1)
    num_rows = int(torch.maximum(graph.sender.max(), graph.receiver.max())) + 1 if len(counted) else 1
    pair, index = torch.unique(receiver * num_rows + sender, return_inverse=True)
    nearest = distances.detach().new_full((len(pair),), float("inf"))
    merged = NearGraph(
        sender=pair % num_rows,
        receiver=pair // num_rows,
        distances=nearest.scatter_reduce(0, index, distances.detach(), "amin"),
        cutoff=torch.ones_like(nearest),
    )
    column = index.unsqueeze(-1).expand_as(log_weight)
    largest = log_weight.detach().new_full((len(pair), log_weight.shape[-1]), float("-inf"))
    largest = largest.scatter_reduce(0, column, log_weight.detach(), "amax")
    weights = (log_weight - largest.index_select(0, index)).exp()
    return merged, torch.zeros_like(largest).index_add(0, index, weights).log() + largest


def near_sums(
    query: Float[Tensor, "B H N D"],
    key: Float[Tensor, "B H N D"],
    value: Float[Tensor, "B H N D"],
    graph: NearGraph,
    edge_bias: Float[Tensor, "E H"],
    self_bias: Float[Tensor, "H"],
) -> ScaledSums:
    """Sums over the near weights of each atom; the normaliser of every row is at least 1.

    Args:
        query, key, value: q, k and v; padded rows must be finite, and get their own v.
        graph: the edges.
        edge_bias: f of the edges.
        self_bias: f of an atom with itself.
    """
    shape = query.shape
    q, k, v = (x.transpose(1, 2).reshape(-1, shape[1], shape[-1]) for x in (query, key, value))
    q = q * shape[-1] ** -0.5
    arguments = (q, k, v, graph.sender, graph.receiver, graph.cutoff, edge_bias, self_bias)
    if len(graph.sender) * q.shape[1] * q.shape[2] > RECOMPUTED_ELEMENTS:
        sums = recomputed(_ragged_sums, *arguments)
    else:
        sums = _ragged_sums(*arguments)
    # [B N, H, D + 2]: numerator, normaliser, log scale.
    sums = sums.unflatten(0, (shape[0], shape[2])).transpose(1, 2)
    return ScaledSums(sums[..., :-2], sums[..., -2:-1], sums[..., -1:].detach())


def _ragged_sums(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sender: Tensor,
    receiver: Tensor,
    cutoff: Tensor,
    edge_bias: Tensor,
    self_bias: Tensor,
) -> Tensor:
    """Numerator, normaliser and log scale `[A, H, D + 2]` from q (scaled), k and v `[A, H, D]`."""
    counted = cutoff > SMALLEST_CUTOFF
    log_cutoff = torch.where(counted, cutoff, 1.0).log().masked_fill(~counted, float("-inf"))
    logits = (query.index_select(0, receiver) * key.index_select(0, sender)).sum(-1) + edge_bias
    logits = logits + log_cutoff.to(logits.dtype).unsqueeze(-1)
    own_logits = (query * key).sum(-1) + self_bias

    index = receiver.unsqueeze(-1).expand_as(logits)
    largest = own_logits.detach().scatter_reduce(0, index, logits.detach(), "amax")
    weights = (logits - largest.index_select(0, receiver)).exp()
    own_weights = (own_logits - largest).exp()

    messages = weights.unsqueeze(-1) * value.index_select(0, sender)
    numerator = (own_weights.unsqueeze(-1) * value).index_add(0, receiver, messages)
    normalizer = own_weights.index_add(0, receiver, weights)
    return torch.cat((numerator, normalizer.unsqueeze(-1), largest.unsqueeze(-1)), dim=-1)


def dense_near_log_weights(
    query: Float[Tensor, "B H N D"],
    key: Float[Tensor, "B H N D"],
    graph: NearGraph,
    edge_bias: Float[Tensor, "E H"],
    self_bias: Float[Tensor, "H"],
) -> tuple[Float[Tensor, "B H N N"], Float[Tensor, "B H N N"]]:
    """q_i.k_j / sqrt(D), and sum_e c_e exp(f_e) with exp(f_self) on the diagonal: factors of the weights.

    The weights are exp(first) times second; quadratic in N.
    """
    num_graphs, num_heads, num_atoms, head_dim = query.shape
    logits = query @ key.transpose(-1, -2) / head_dim**0.5
    graph_index, row = graph.receiver // num_atoms, graph.receiver % num_atoms
    column = graph.sender % num_atoms
    factors = torch.diag_embed(self_bias.exp().view(1, num_heads, 1).expand(num_graphs, -1, num_atoms))
    flat = factors.permute(0, 2, 3, 1).reshape(-1, num_heads)
    pair = (graph_index * num_atoms + row) * num_atoms + column
    flat = flat.index_add(0, pair, (graph.cutoff.unsqueeze(-1) * edge_bias.exp()).to(flat.dtype))
    return logits, flat.view(num_graphs, num_atoms, num_atoms, num_heads).permute(0, 3, 1, 2)
