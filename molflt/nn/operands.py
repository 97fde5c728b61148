"""Queries and keys as a feature map sees them.

A coupling decides which vectors q^, k^ the feature map linearises: q D^-1/4 alone, or
[query RPE features, q D^-1/4]. Most maps need only projections W q^, so the concatenation is never formed: W
q^ is the sum of two matrix products, and the RPE's weights, signs and phases are folded into its share of W
(`FourierRPE.fold`), which lets queries and keys share one trigonometric basis.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from molflt.nn.rpe import FourierRPE


class Term(NamedTuple):
    """One matrix product x @ weight of a sum: x `[B, H, N, E]`, weight `[H, E, M]` or `[B, H, E, M]`."""

    x: Tensor
    weight: Tensor


def affine_sum(bias: Float[Tensor, "#B #H #N #M"], terms: Sequence[Term]) -> Float[Tensor, "B H N M"]:
    """`bias` plus the matrix products of all terms, accumulated in one tensor."""
    num_graphs, num_heads, num_tokens = terms[0].x.shape[:3]
    bias = bias.expand(num_graphs, num_heads, num_tokens, -1).flatten(0, 1)
    factors = [
        (x.flatten(0, 1), weight.expand(num_graphs, num_heads, *weight.shape[-2:]).flatten(0, 1))
        for x, weight in terms
    ]
    return sum_of_products(bias, factors).unflatten(0, (num_graphs, num_heads))


def heads_first_affine_sum(
    bias: Float[Tensor, "#H #B #N #M"], terms: Sequence[Term]
) -> Float[Tensor, "H B N M"]:
    """`affine_sum` for x `[H, B, N, E]` and weights `[H, E, M]` of all graphs: one product per head.

    Weights are not repeated for each graph, nor is x copied that is `[B, N, H, E]` in memory, as linear
    layers lay it out.
    """
    num_heads, num_graphs, num_tokens = terms[0].x.shape[:3]
    bias = bias.expand(num_heads, num_graphs, num_tokens, -1).flatten(1, 2)
    factors = [(x.flatten(1, 2), weight) for x, weight in terms]
    return sum_of_products(bias, factors).unflatten(1, (num_graphs, num_tokens))


def sum_of_products(
    bias: Float[Tensor, "K N #M"], factors: Sequence[tuple[Tensor, Tensor]]
) -> Float[Tensor, "K N M"]:
    """`bias` plus the batched products of all pairs of factors, a new tensor."""
    total = torch.baddbmm(bias, *factors[0])
    for left, right in factors[1:]:
        total.baddbmm_(left, right)
    return total


class Projection(NamedTuple):
    """W q^ and W k^, each as a sum of matrix products still to be done.

    Attributes:
        query_terms, key_terms: the products.
        heads_first: whether x of the terms, biases and results are `[H, B, ...]` instead of `[B, H, ...]`.
    """

    query_terms: Sequence[Term]
    key_terms: Sequence[Term]
    heads_first: bool = False

    def query(self, bias: Float[Tensor, "#B #H #N #M"]) -> Float[Tensor, "B H N M"]:
        """W q^ + bias, a new tensor."""
        return (heads_first_affine_sum if self.heads_first else affine_sum)(bias, self.query_terms)

    def key(self, bias: Float[Tensor, "#B #H #N #M"]) -> Float[Tensor, "B H N M"]:
        """W k^ + bias, a new tensor."""
        return (heads_first_affine_sum if self.heads_first else affine_sum)(bias, self.key_terms)

    def shares_weights(self) -> bool:
        """Whether all graphs have the same weights."""
        return all(weight.ndim == 3 for _, weight in (*self.query_terms, *self.key_terms))

    def with_heads_first(self) -> Projection:
        """The same with heads before graphs; only where graphs share weights."""
        query = [Term(x.transpose(0, 1), weight) for x, weight in self.query_terms]
        key = [Term(x.transpose(0, 1), weight) for x, weight in self.key_terms]
        return Projection(query, key, heads_first=True)

    @property
    def num_features(self) -> int:
        """M."""
        return self.query_terms[0].weight.shape[-1]

    def split(self, num_heads: int) -> list[Projection]:
        """The projection, `num_heads` heads at a time: by split, whose gradient concatenates, not adds."""
        # An x in terms of both sides is split once, so that its gradients add up part by part.
        parts = {id(x): x.split(num_heads, dim=1) for x, _ in (*self.query_terms, *self.key_terms)}

        def split_terms(terms: Sequence[Term]) -> Iterable[tuple[Term, ...]]:
            split = [zip(parts[id(x)], w.split(num_heads, dim=-3), strict=True) for x, w in terms]
            return zip(*([Term(*pair) for pair in pairs] for pairs in split), strict=True)

        queries, keys = split_terms(self.query_terms), split_terms(self.key_terms)
        return [Projection(query, key) for query, key in zip(queries, keys, strict=True)]

    def scaled(self, gain: Float[Tensor, "#B #H 1 1"]) -> Projection:
        """The projection of gain q^ and gain k^."""
        return Projection(
            [Term(x, weight * gain) for x, weight in self.query_terms],
            [Term(x, weight * gain) for x, weight in self.key_terms],
        )


def token_mean(
    x: Float[Tensor, "B H N E"], atom_mask: Bool[Tensor, "B N"] | None
) -> Float[Tensor, "B H 1 E"]:
    """Mean over the real tokens; zero for a graph without any."""
    if atom_mask is None:
        return x.mean(-2, keepdim=True)
    real = atom_mask[:, None, :, None]
    return x.masked_fill(~real, 0.0).sum(-2, keepdim=True) / real.sum(-2, keepdim=True).clamp_min(1)


class Operands:
    """q^ = scale q and k^ = scale k: plain dot-product attention.

    Args:
        query, key: q and k, `[B, H, N, D]`.
        scale: D^-1/4 by default, which makes q^.k^ = q.k / sqrt(D).
    """

    def __init__(
        self, query: Float[Tensor, "B H N D"], key: Float[Tensor, "B H N D"], scale: float | None = None
    ) -> None:
        self.query = query
        self.key = key
        self.scale = query.shape[-1] ** -0.25 if scale is None else scale

    def with_content(
        self, query: Float[Tensor, "B H N D"], key: Float[Tensor, "B H N D"], scale: float
    ) -> Operands:
        """The same operands with other queries and keys."""
        return Operands(query, key, scale)

    def normalized(self, temperature: Float[Tensor, "H"]) -> Operands:
        """Operands whose q and k have the length sqrt(temperature), the RPE features being as they were."""
        length = temperature.sqrt()[:, None, None]
        return self.with_content(
            F.normalize(self.query, dim=-1) * length, F.normalize(self.key, dim=-1) * length, scale=1.0
        )

    def project(self, projection: Float[Tensor, "H M E"]) -> Projection:
        """W q^ and W k^ for the rows W of `projection`."""
        weight = (projection * self.scale).transpose(-1, -2)
        return Projection([Term(self.query, weight)], [Term(self.key, weight)])

    def half_squared_key_norm(self) -> Float[Tensor, "B H N 1"]:
        """|k^|^2 / 2, up to a constant per graph and head."""
        if torch.is_grad_enabled() and self.key.requires_grad:
            squared_norm = self.key.square().sum(-1, keepdim=True)
        else:
            # Without a temporary of the keys' size; but its second derivative at zero is NaN.
            squared_norm = torch.linalg.vector_norm(self.key, dim=-1, keepdim=True).square()
        return (0.5 * self.scale**2) * squared_norm

    def mean_squared_sum(self, atom_mask: Bool[Tensor, "B N"] | None) -> Float[Tensor, "B H 1 1"]:
        """Mean of |q^_i + k^_j|^2 over the pairs of real tokens."""
        squares = self.query.square().sum(-1, keepdim=True) + self.key.square().sum(-1, keepdim=True)
        cross = (token_mean(self.query, atom_mask) * token_mean(self.key, atom_mask)).sum(-1, keepdim=True)
        return self.scale**2 * (token_mean(squares, atom_mask) + 2 * cross)

    def concatenated(self) -> tuple[Float[Tensor, "B H N E"], Float[Tensor, "B H N E"]]:
        """q^ and k^ in full, for maps that are no function of a projection."""
        return self.query * self.scale, self.key * self.scale


class FourierOperands(Operands):
    """q^ = [query RPE features, scale q] and k^ = [key RPE features, scale k].

    Then q^_i.k^_j = scale^2 q_i.k_j + f_hat(r_i - r_j).

    Args:
        query, key, scale: as in `Operands`.
        rpe: turns positions into features.
        basis: `rpe.basis(pos)`, `[B, H, N, 2R]`.
    """

    def __init__(
        self,
        query: Float[Tensor, "B H N D"],
        key: Float[Tensor, "B H N D"],
        rpe: FourierRPE,
        basis: Float[Tensor, "B H N K"],
        scale: float | None = None,
    ) -> None:
        super().__init__(query, key, scale)
        self.rpe = rpe
        self.basis = basis

    def with_content(
        self, query: Float[Tensor, "B H N D"], key: Float[Tensor, "B H N D"], scale: float
    ) -> FourierOperands:
        return FourierOperands(query, key, self.rpe, self.basis, scale)

    def project(self, projection: Float[Tensor, "H M E"]) -> Projection:
        """As in `Operands`; the first 2R columns of `projection` belong to the RPE features."""
        width = self.basis.shape[-1]
        content = super().project(projection[..., width:])
        query_weight, key_weight = self.rpe.fold(projection[..., :width])
        return Projection(
            [*content.query_terms, Term(self.basis, query_weight.transpose(-1, -2))],
            [*content.key_terms, Term(self.basis, key_weight.transpose(-1, -2))],
        )

    def rpe_features(
        self, basis: Float[Tensor, "B H #N K"]
    ) -> tuple[Float[Tensor, "B H #N K"], Float[Tensor, "B H #N K"]]:
        """Query and key RPE features of (any linear combination of) rows of the basis."""
        identity = torch.eye(basis.shape[-1], dtype=basis.dtype, device=basis.device)
        query_weight, key_weight = self.rpe.fold(identity)
        return basis @ query_weight.transpose(-1, -2), basis @ key_weight.transpose(-1, -2)

    def mean_squared_sum(self, atom_mask: Bool[Tensor, "B N"] | None) -> Float[Tensor, "B H 1 1"]:
        query_mean, key_mean = self.rpe_features(token_mean(self.basis, atom_mask))
        query_norm, key_norm = self.rpe.squared_norms()
        norms = (query_norm + key_norm).to(self.basis.dtype)[..., None, None]
        cross = (query_mean * key_mean).sum(-1, keepdim=True)
        return super().mean_squared_sum(atom_mask) + norms + 2 * cross

    def concatenated(self) -> tuple[Float[Tensor, "B H N E"], Float[Tensor, "B H N E"]]:
        query_rpe_features, key_rpe_features = self.rpe_features(self.basis)
        query, key = super().concatenated()
        return torch.cat([query_rpe_features, query], dim=-1), torch.cat([key_rpe_features, key], dim=-1)
