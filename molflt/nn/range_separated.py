"""Range-separated attention: exact over near edges, linear in the atoms beyond, under one normaliser.

    out_i = sum_j a_ij v_j / sum_j a_ij,     a_ij = a^near_ij + a^far_ij

    a^near_ij = sum_images c(d) exp(q_i.k_j / sqrt(D) + f_near(d))     `molflt.nn.near`
    a^far_ij  = phi(q_i).phi(k_j) M_per(r_i - r_j)                     `molflt.nn.far`

A sharp f has too high a rank for Fourier features, so that part is exact over a radius graph with images;
the smooth rest is read on each structure's reciprocal lattice. Both parts are sums over images of positive
weights, and on one scale. So a supercell gives its atoms the outputs of the cell's, any cell of a lattice
gives the same, and the output is invariant under translation, and under rotation of cell and positions.
Without the far part this is softmax attention over the near graph and the atom itself.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from molflt.nn.far import FarModulation, FarPositions
from molflt.nn.far_attention import far_sums, log_query_factor
from molflt.nn.feature_maps import ExponentialFeatures, FeatureMap, PositiveRandomFeatures
from molflt.nn.features import LogFeatures, PlainFeatures
from molflt.nn.functional import mask_rows
from molflt.nn.kernel_feature_maps import EluFeatures, ReLUFeatures
from molflt.nn.multihead import zero_padding
from molflt.nn.near import (
    NearBias,
    NearGraph,
    ScaledSums,
    dense_near_log_weights,
    merge_images,
    near_sums,
)
from molflt.nn.near_pairs import most_pairs_are_near, near_pair_bias, near_pair_sums
from molflt.nn.operands import Operands
from molflt.nn.periodic import PeriodicAttention, PeriodicGeometry


class NearPositions(NamedTuple):
    """The near part's edges, the images of a pair merged into one."""

    graph: NearGraph
    edge_bias: Tensor
    """`[E, H]`: f_near of the edges."""
    self_bias: Tensor
    """`[H]`: f_near of an atom with itself."""
    pair_bias: Tensor | None = None
    """`[B, H, N, N]`: both for all pairs, where most are near."""


class RangeSeparatedPositions(NamedTuple):
    """What depends on positions alone: computed once for all layers that share an RPE."""

    near: NearPositions | None
    far: FarPositions | None


class RangeSeparatedRPE(nn.Module):
    """f_near and M, shared between layers by passing one object.

    Args:
        near: f_near; None leaves the near part out, and what is left is linear attention with the
            multiplicative coupling on the reciprocal lattice.
        far: M; None leaves the far part out, and what is left is softmax attention over the near graph.

    Raises:
        ValueError: `near` and `far` differ in their number of heads, or both are None.
    """

    position_dim = 3

    def __init__(self, near: NearBias | None, far: FarModulation | None) -> None:
        super().__init__()
        num_heads = {part.num_heads for part in (near, far) if part is not None}
        if not num_heads:
            raise ValueError("near and far must not both be None")
        if len(num_heads) > 1:
            raise ValueError(f"near and far must have one number of heads, got {sorted(num_heads)}")
        self.near = near
        self.far = far
        self.num_heads = num_heads.pop()

    def reset_parameters(self) -> None:
        for part in (self.near, self.far):
            if part is not None:
                part.reset_parameters()

    def forward(self, geometry: PeriodicGeometry) -> RangeSeparatedPositions:
        """Biases of edges, and basis and weights of the far part."""
        with torch.autocast(geometry.pos.device.type, enabled=False):
            near = far = None
            if self.near is not None:
                near = near_positions(geometry, self.near)
            if self.far is not None:
                pos = centred(geometry.pos, geometry.atom_mask)
                far = self.far(geometry.cell.to(pos.dtype), geometry.pbc, pos, geometry.atom_mask)
            return RangeSeparatedPositions(near, far)


def near_positions(geometry: PeriodicGeometry, bias: NearBias) -> NearPositions:
    """The merged edges of a batch, and their biases in the form that is cheaper for the layers."""
    graph, edge_bias = merge_images(geometry.near, bias(geometry.near))
    self_bias, shape = bias.self_bias(), geometry.atom_mask.shape
    pairs = None
    if most_pairs_are_near(graph, *shape):
        pairs = near_pair_bias(graph, edge_bias, self_bias, *shape)
    return NearPositions(graph, edge_bias, self_bias, pairs)


def centred(pos: Float[Tensor, "B N X"], atom_mask: Bool[Tensor, "B N"]) -> Float[Tensor, "B N X"]:
    """Positions relative to the mean of their graph's atoms, zero at padding: phases of small numbers round
    less."""
    real = zero_padding(pos, atom_mask)
    mean = real.sum(1, keepdim=True) / atom_mask.sum(1).clamp(min=1)[:, None, None]
    return zero_padding(real - mean, atom_mask)


def range_separated_attention(
    query: Float[Tensor, "B H N D"],
    key: Float[Tensor, "B H N D"],
    value: Float[Tensor, "B H N D"],
    positional: RangeSeparatedPositions,
    atom_mask: Bool[Tensor, "B N"] | None = None,
    *,
    feature_map: FeatureMap,
    separate_normalizers: bool = False,
) -> Float[Tensor, "B H N D"]:
    """The core: queries, keys and values in, output out, at a cost linear in atoms and edges.

    Sums are in float32 (float64 for float64 input) whatever the input's type and autocast.

    Args:
        query, key, value: q, k and v. Padded rows must be finite.
        positional: from `RangeSeparatedRPE`.
        atom_mask: true at real atoms; other rows influence nothing.
        feature_map: built for this number of heads and width D.
        separate_normalizers: adds the outputs of two attentions instead, each divided by its own normaliser.
    """
    with torch.autocast(query.device.type, enabled=False):
        dtype = torch.promote_types(query.dtype, torch.float32)
        q, k, v = (x.to(dtype) for x in (query, key, value))
        parts: list[ScaledSums] = []
        if positional.near is not None:
            graph, edge_bias, self_bias, pairs = positional.near
            if pairs is None:
                parts.append(near_sums(q, k, v, graph, edge_bias.to(dtype), self_bias.to(dtype)))
            else:
                parts.append(near_pair_sums(q, k, v, pairs.to(dtype)))
        if positional.far is not None:
            parts.append(far_sums(q, k, v, positional.far, atom_mask, feature_map))
        if len(parts) == 1:
            out = parts[0].quotient()
        elif separate_normalizers:
            out = parts[0].quotient() + parts[1].quotient()
        else:
            out = parts[0].add(parts[1]).quotient()
        return out.to(value.dtype)


def dense_range_separated_attention(
    query: Float[Tensor, "B H N D"],
    key: Float[Tensor, "B H N D"],
    value: Float[Tensor, "B H N D"],
    positional: RangeSeparatedPositions,
    atom_mask: Bool[Tensor, "B N"] | None = None,
    *,
    feature_map: FeatureMap,
    separate_normalizers: bool = False,
    modulation: Float[Tensor, "B H N N"] | None = None,
) -> Float[Tensor, "B H N D"]:
    """The quadratic twin, which forms all weights; arguments as in `range_separated_attention`.

    Args:
        modulation: M_per, such as `FarModulation.image_sum`; from `positional` by default.
    """
    if positional.near is None:
        raise ValueError("positional must have a near part, got None: the far part's twin is far.dense()")
    (graph, edge_bias, self_bias, _), far = positional.near, positional.far
    value = mask_rows(value, atom_mask)
    logits, factors = dense_near_log_weights(query, key, graph, edge_bias, self_bias)
    largest = logits.detach().amax(-1, keepdim=True)
    near = factors * (logits - largest).exp()
    if far is None:
        return near @ value / near.sum(-1, keepdim=True)
    operands = Operands(query, key)
    features = feature_map(operands, atom_mask)
    if isinstance(features, LogFeatures):
        zero = query.new_zeros(1, 1, 1, 1) if features.query_bias is None else features.query_bias
        log_query = features.projection.query(zero) + log_query_factor(feature_map, operands, atom_mask)
        log_key = features.projection.key(features.key_bias)
        similarity = (log_query.unsqueeze(-2) + log_key.unsqueeze(-3) - largest.unsqueeze(-1)).exp().sum(-1)
    else:
        assert isinstance(features, PlainFeatures)
        similarity = (features.query @ features.key.transpose(-1, -2)) * (-largest).exp()
    beyond = similarity * (far.dense() if modulation is None else modulation)
    if separate_normalizers:
        return sum_of_quotients(near, beyond, value)
    weights = near + beyond
    return weights @ value / weights.sum(-1, keepdim=True)


def sum_of_quotients(near: Tensor, beyond: Tensor, value: Tensor) -> Tensor:
    """Two attentions side by side; rows of padding without weights give 0."""
    total = beyond.sum(-1, keepdim=True)
    far_out = beyond @ value / torch.where(total == 0, 1.0, total)
    return near @ value / near.sum(-1, keepdim=True) + far_out


class RangeSeparatedAttention(PeriodicAttention):
    """Multi-head attention, exact near and linear far, for structures of any periodicity.

    Parameters: q, k, v and output projections as in `FLTAttention`, those of `rpe`, and none more for the far
    part or for `separate_normalizers`, which share q, k and v.

    Args:
        channels: C, width of the output.
        num_heads: H, divides `channels`.
        rpe: f_near and M, shared between layers by passing one object.
        feature_map: phi of the far part; positive random features, 16, by default. One with positive values
            only: positive, hyperbolic, FAVOR++, ReLU or elu+1.
        separate_normalizers: two attentions side by side, their outputs added, instead of one.
        in_channels: width of the input, `channels` by default.
        bias: whether the four projections have one.

    Raises:
        ValueError: `num_heads` does not divide `channels`; `rpe` has another number of heads; the features of
            `feature_map` can be negative; `forward` without positions.
    """

    def __init__(
        self,
        channels: int,
        num_heads: int,
        *,
        rpe: RangeSeparatedRPE,
        feature_map: FeatureMap | None = None,
        separate_normalizers: bool = False,
        in_channels: int | None = None,
        bias: bool = True,
    ) -> None:
        feature_map = PositiveRandomFeatures(16) if feature_map is None else feature_map
        if not isinstance(feature_map, ExponentialFeatures | ReLUFeatures | EluFeatures):
            raise ValueError(
                f"feature_map must have positive features only, got {type(feature_map).__name__}: use "
                "PositiveRandomFeatures, HyperbolicRandomFeatures, OptimalPositiveFeatures, ReLUFeatures or "
                "EluFeatures"
            )
        super().__init__(
            channels,
            num_heads,
            rpe=rpe,
            feature_map=feature_map,
            feature_width=channels // num_heads,
            in_channels=in_channels,
            bias=bias,
        )
        self.separate_normalizers = separate_normalizers

    def attend(
        self,
        query: Float[Tensor, "B H N D"],
        key: Float[Tensor, "B H N D"],
        value: Float[Tensor, "B H N D"],
        positional: RangeSeparatedPositions,
        atom_mask: Bool[Tensor, "B N"] | None,
    ) -> Float[Tensor, "B H N D"]:
        """`range_separated_attention` with this layer's features."""
        return range_separated_attention(
            query,
            key,
            value,
            positional,
            atom_mask,
            feature_map=self.feature_map,
            separate_normalizers=self.separate_normalizers,
        )

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, separate_normalizers={self.separate_normalizers}"
