"""The far part of attention, a_ij = phi(q_i).phi(k_j) M_per(r_i - r_j), summed in linear order.

phi estimates exp(q.k / sqrt(D)), so far weights and the exact near ones (`molflt.nn.near`) compare as they
stand, and no stabiliser may be dropped that differs between rows. With q^ = q D^-1/4, k^ = k D^-1/4 and
rows w_m of W,

    phi(q_i).phi(k_j) = (const / M) sum_m exp(w_m.q^_i - |q^_i|^2/2 + b_m) exp(w_m.k^_j - |k^_j|^2/2)

(b_m and const are 0 and 1 but for FAVOR++). With C_m the largest log feature of the real keys and r_i the
largest of w_m.q^_i + b_m + C_m over m,

    log a^far_ij = log sum_m exp(w_m.q^_i + b_m + C_m - r_i) exp(w_m.k^_j - |k^_j|^2/2 - C_m) M_ij + S_i
    S_i = r_i - |q^_i|^2/2 - log M + log const

where no exponent is positive. Sums over j are formed without S_i, and meet those of the near part on the
scale of the larger normaliser (`ScaledSums.add`). C_m and r_i are detached, which changes no gradient since
each is added where it is subtracted. ReLU and elu+1 features are what they are: S_i = 0.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from molflt.nn.causal import LOWEST_LOG_FEATURE
from molflt.nn.far import FarPositions
from molflt.nn.feature_maps import ExponentialFeatures, FeatureMap
from molflt.nn.features import LogFeatures, PlainFeatures
from molflt.nn.functional import KRONECKER_WIDTH, append_ones, kronecker, recomputed
from molflt.nn.near import ScaledSums
from molflt.nn.operands import Operands

MAX_BLOCKS = 32
"""Each block of columns that is formed again in the backward pass keeps some memory to its end."""
MAX_PAIR_ATOMS = 256
"""Padded graphs of more atoms never form their N x N weights."""


def far_features(
    feature_map: FeatureMap,
    query: Float[Tensor, "B H N D"],
    key: Float[Tensor, "B H N D"],
    atom_mask: Bool[Tensor, "B N"] | None,
) -> tuple[Float[Tensor, "B H N M"], Float[Tensor, "B H N M"], Float[Tensor, "B H N 1"]]:
    """Features of queries and keys (padded keys 0) and S_i: phi(q_i).phi(k_j) = exp(S_i) query_i . key_j."""
    operands = Operands(query, key)
    features = feature_map(operands, atom_mask)
    if isinstance(features, PlainFeatures):
        return features.query, features.key, torch.zeros_like(features.query[..., :1])
    assert isinstance(features, LogFeatures)
    log_key = features.projection.key(features.key_bias)
    # The floor acts only in graphs without atoms.
    ceiling = log_key.detach().amax(-2, keepdim=True).clamp_min(LOWEST_LOG_FEATURE)
    bias = ceiling if features.query_bias is None else ceiling + features.query_bias
    log_query = features.projection.query(bias)
    largest = log_query.detach().amax(-1, keepdim=True)
    log_scale = largest + log_query_factor(feature_map, operands, atom_mask)
    return (log_query - largest).exp(), (log_key - ceiling).exp(), log_scale


def log_query_factor(
    feature_map: FeatureMap, operands: Operands, atom_mask: Bool[Tensor, "B N"] | None
) -> Float[Tensor, "B H N 1"]:
    """log of the factors of the query, and of the constants, that exponential feature maps leave out:
    -|q^|^2/2 - log M, and D log sqrt(1-4A) of FAVOR++."""
    assert isinstance(feature_map, ExponentialFeatures)
    query = operands.scale * operands.query
    factor = -0.5 * query.square().sum(-1, keepdim=True) - math.log(feature_map.num_random_features)
    gain, _ = feature_map.gain_and_bias(operands, atom_mask)
    return factor if gain is None else factor + query.shape[-1] * gain.log()


def far_sums(
    query: Float[Tensor, "B H N D"],
    key: Float[Tensor, "B H N D"],
    value: Float[Tensor, "B H N D"],
    far: FarPositions,
    atom_mask: Bool[Tensor, "B N"] | None,
    feature_map: FeatureMap,
) -> ScaledSums:
    """Sums over the far weights of each atom, at cost O(N M R D).

    Kronecker features of phi and the trigonometric columns are formed some columns at a time, and again in
    the backward pass. In small graphs the same sums are taken pair by pair, which is then the shorter way.
    """
    query_features, key_features, log_scale = far_features(feature_map, query, key, atom_mask)
    columns, weights = (part.to(value.dtype) for part in far.columns())
    ones = append_ones(value)
    if pairs_are_cheaper(value.shape[-2], query_features.shape[-1], columns.shape[-1], ones.shape[-1]):
        pairs = far.dense().to(value.dtype) * (query_features @ key_features.transpose(-1, -2))
        total = pairs @ ones
        return ScaledSums(total[..., :-1], total[..., -1:], log_scale)
    total = torch.zeros_like(ones)
    size = max(1, KRONECKER_WIDTH // query_features.shape[-1], math.ceil(columns.shape[-1] / MAX_BLOCKS))
    for column, weight in zip(columns.split(size, -1), weights.split(size, -1), strict=True):
        total = total + recomputed(_block_sums, query_features, key_features, ones, column, weight)
    return ScaledSums(total[..., :-1], total[..., -1:], log_scale)


def pairs_are_cheaper(num_atoms: int, num_features: int, num_columns: int, width: int) -> bool:
    """Whether N^2 (M + K + D) operations beat the 2 N M K D of the linear order, in graphs of few atoms.

    K grows with the cell as N does, so without a limit on N the pairs would win in every large cell too.
    """
    pairs = num_atoms * (num_features + num_columns + width)
    return num_atoms <= MAX_PAIR_ATOMS and pairs < 2 * num_features * num_columns * width


def _block_sums(query: Tensor, key: Tensor, value: Tensor, column: Tensor, weight: Tensor) -> Tensor:
    """sum_j phi(q_i).phi(k_j) sum_k w_k column_ik column_jk v_j over a few columns `[B, 1, N, k]`.

    The weights `[B, H, k]` multiply the sums over j, so the columns are the same memory for all heads.
    """
    column = column.expand(-1, query.shape[1], -1, -1)
    weight = weight.unsqueeze(-2).expand(-1, -1, query.shape[-1], -1).flatten(-2).unsqueeze(-1)
    return kronecker(query, column) @ (weight * (kronecker(key, column).transpose(-1, -2) @ value))
