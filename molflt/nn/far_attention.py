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
from molflt.nn.functional import append_ones, recomputed
from molflt.nn.near import ScaledSums
from molflt.nn.operands import Operands

BLOCK_ELEMENTS = 2**22
"""Numbers phi(k) [v, 1] that are formed at a time, 16 MiB of float32."""
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

    The moments sum_j column_jk phi(k_j) [v_j, 1] are one product with the trigonometric columns, which all
    heads share, and so is what they give back at the atoms. phi(k) [v, 1], of N M (D + 1) numbers a head, is
    formed for some heads at a time; where that is not for all at once, again in the backward pass. In small
    graphs the same sums are taken pair by pair, which is then the shorter way.
    """
    query_features, key_features, log_scale = far_features(feature_map, query, key, atom_mask)
    columns, weights = (part.to(value.dtype) for part in far.columns())
    ones = append_ones(value)
    if pairs_are_cheaper(value.shape[-2], query_features.shape[-1], columns.shape[-1], ones.shape[-1]):
        pairs = far.dense().to(value.dtype) * (query_features @ key_features.transpose(-1, -2))
        total = pairs @ ones
        return ScaledSums(total[..., :-1], total[..., -1:], log_scale)
    per_head = query_features.numel() // max(1, query_features.shape[1]) * ones.shape[-1]
    size = min(max(1, BLOCK_ELEMENTS // max(1, per_head)), query_features.shape[1])
    split = [x.split(size, dim=1) for x in (query_features, key_features, ones, weights)]
    blocks = [
        _head_sums(q, k, v, w, columns) if len(split[0]) == 1 else recomputed(_head_sums, q, k, v, w, columns)
        for q, k, v, w in zip(*split, strict=True)
    ]
    total = torch.cat(blocks, dim=1)
    return ScaledSums(total[..., :-1], total[..., -1:], log_scale)


def pairs_are_cheaper(num_atoms: int, num_features: int, num_columns: int, width: int) -> bool:
    """Whether N^2 (M + K + D) operations beat the 2 N M K D of the linear order, in graphs of few atoms.

    K grows with the cell as N does, so without a limit on N the pairs would win in every large cell too.
    """
    pairs = num_atoms * (num_features + num_columns + width)
    return num_atoms <= MAX_PAIR_ATOMS and pairs < 2 * num_features * num_columns * width


def _head_sums(query: Tensor, key: Tensor, value: Tensor, weight: Tensor, columns: Tensor) -> Tensor:
    """sum_j phi(q_i).phi(k_j) sum_k w_k column_ik column_jk v_j of some heads, columns `[B, 1, N, K]`."""
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    columns = columns.squeeze(1)
    shape = (*key.shape[2:], value.shape[-1])
    moments = columns.mT @ (key.unsqueeze(-1) * value.unsqueeze(-2)).flatten(2)
    moments = moments.unflatten(-1, shape) * weight.mT[..., None, None]
    fields = (columns @ moments.flatten(2)).unflatten(-1, shape)
    return (query.unsqueeze(-1) * fields).sum(-2).transpose(1, 2)
