"""Attention as pure functions: linear in the number of tokens, its quadratic rewriting, and softmax.

Linear attention with features phi (Katharopoulos et al. 2020; Choromanski et al. 2021):

    out_i = sum_j a_ij v_j / sum_j a_ij,   a_ij = phi(q_i).phi(k_j)

summed in the order phi(q) (phi(k)^T v), so no N x N matrix is formed. With modulations alpha, beta (the
multiplicative coupling, whose a_ij is phi(q_i).phi(k_j) M(r_i - r_j)) the weights are

    a_ij = phi(q_i).phi(k_j) sum_r alpha_ir beta_jr,

the product of the Kronecker features phi (x) alpha and phi (x) beta. Padded keys are removed from the key
features, hence from numerator and denominator alike. The causal forms are in `molflt.nn.causal`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor
from torch.utils.checkpoint import checkpoint

EPSILON = 1e-6
KRONECKER_WIDTH = 64
LOG2_E = 1 / math.log(2)


def exp_(x: Float[Tensor, "*S"]) -> Float[Tensor, "*S"]:
    """exp(x) in x's place, by the power of 2: on CPUs three times as fast as torch's exp, and ten times where
    exp(x) underflows."""
    return x.mul_(LOG2_E).exp2_()


def mask_rows(x: Float[Tensor, "B H N E"], atom_mask: Bool[Tensor, "B N"] | None) -> Float[Tensor, "B H N E"]:
    """`x` with the rows of padding set to zero, whatever they held."""
    return x if atom_mask is None else x.masked_fill(~atom_mask[:, None, :, None], 0.0)


def normalize(
    numerator: Float[Tensor, "B H N D"], normalizer: Float[Tensor, "B H N 1"], eps: float = EPSILON
) -> Float[Tensor, "B H N D"]:
    """The quotient, where a normaliser smaller than `eps` in size counts as `eps`."""
    return numerator / normalizer.masked_fill(normalizer.abs() < eps, eps)


def append_ones(value: Float[Tensor, "B H N D"]) -> Float[Tensor, "B H N D+1"]:
    """[v, 1]: what is summed for numerator and normaliser together."""
    return F.pad(value, (0, 1), value=1.0)


def linear_attention(
    query_features: Float[Tensor, "B H N M"],
    key_features: Float[Tensor, "B H N M"],
    value: Float[Tensor, "B H N D"],
    atom_mask: Bool[Tensor, "B N"] | None = None,
    eps: float = EPSILON,
) -> Float[Tensor, "B H N D"]:
    """Attention with weights phi(q_i).phi(k_j), at a cost linear in N.

    Args:
        query_features, key_features: phi(q) and phi(k).
        value: v.
        atom_mask: true at real tokens. What padded rows hold, NaN included, touches no other row and receives
            zero gradient; their own output is zero.
        eps: stands in for a normaliser smaller than it, as in a graph without tokens.
    """
    query_features = mask_rows(query_features, atom_mask)
    key_features = mask_rows(key_features, atom_mask)
    return normalize(*linear_sums(query_features, key_features, mask_rows(value, atom_mask)), eps)


def linear_sums(
    query_features: Float[Tensor, "B H N M"],
    key_features: Float[Tensor, "B H N M"],
    value: Float[Tensor, "B H N D"],
) -> tuple[Float[Tensor, "B H N D"], Float[Tensor, "B H N 1"]]:
    """Numerator sum_j a_ij v_j and normaliser sum_j a_ij of linear attention."""
    numerator = query_features @ (key_features.transpose(-1, -2) @ value)
    return numerator, query_features @ key_features.sum(-2).unsqueeze(-1)


def modulated_linear_sums(
    query_features: Float[Tensor, "B H N M"],
    key_features: Float[Tensor, "B H N M"],
    value: Float[Tensor, "B H N D"],
    query_modulation: Float[Tensor, "B H N K"],
    key_modulation: Float[Tensor, "B H N K"],
) -> Float[Tensor, "B H N D"]:
    """sum_j a_ij v_j with a_ij = phi(q_i).phi(k_j) sum_r alpha_ir beta_jr, at cost O(N M K D).

    The Kronecker features are formed a few modulations at a time, and formed again in the backward pass, so
    that memory stays a small multiple of the arguments'.
    """

    total = torch.zeros_like(value)
    for alpha, beta in kronecker_blocks(query_modulation, key_modulation, query_features.shape[-1]):
        total = total + recomputed(kronecker_sums, query_features, key_features, value, alpha, beta)
    return total


def kronecker_sums(query: Tensor, key: Tensor, value: Tensor, alpha: Tensor, beta: Tensor) -> Tensor:
    """`modulated_linear_sums` with all Kronecker features at once."""
    return kronecker(query, alpha) @ (kronecker(key, beta).transpose(-1, -2) @ value)


def kronecker(
    features: Float[Tensor, "*rows M"], modulation: Float[Tensor, "*rows K"]
) -> Float[Tensor, "*rows MK"]:
    """Row-wise Kronecker product."""
    return (features.unsqueeze(-1) * modulation.unsqueeze(-2)).flatten(-2)


def kronecker_blocks(
    alpha: Float[Tensor, "*rows K"], beta: Float[Tensor, "*rows K"], num_features: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """`alpha` and `beta` a few columns at a time, so that their Kronecker features are about 64 wide."""
    size = max(1, KRONECKER_WIDTH // num_features)
    return zip(alpha.split(size, -1), beta.split(size, -1), strict=True)


def recomputed(function: Callable[..., Tensor], *arguments: object) -> Tensor:
    """`function(*arguments)`, whose intermediate results the backward pass computes again instead of
    keeping."""
    if not torch.is_grad_enabled():
        return function(*arguments)
    return checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False)


def quadratic_linear_attention(
    query_features: Float[Tensor, "B H N M"],
    key_features: Float[Tensor, "B H N M"],
    value: Float[Tensor, "B H N D"],
    atom_mask: Bool[Tensor, "B N"] | None = None,
    eps: float = EPSILON,
    causal: bool = False,
    modulation: Float[Tensor, "B H N N"] | None = None,
) -> Float[Tensor, "B H N D"]:
    """The quadratic twin: the weights a_ij (times `modulation`, lower triangle if `causal`) are formed."""
    weights = mask_rows(query_features, atom_mask) @ mask_rows(key_features, atom_mask).transpose(-1, -2)
    if modulation is not None:
        weights = weights * modulation
    if causal:
        weights = weights.tril()
    return normalize(weights @ mask_rows(value, atom_mask), weights.sum(-1, keepdim=True), eps)


def softmax_attention(
    query: Float[Tensor, "B H N D"],
    key: Float[Tensor, "B H N D"],
    value: Float[Tensor, "B H N E"],
    rpe_bias: Float[Tensor, "#B #H N N"] | None = None,
    atom_mask: Bool[Tensor, "B N"] | None = None,
    causal: bool = False,
) -> Float[Tensor, "B H N E"]:
    """Softmax attention with weights exp(q_i.k_j / sqrt(D) + rpe_bias_ij), at a cost quadratic in N.

    `atom_mask` as in `linear_attention`: padded rows touch no other row and their own output is zero.
    """
    if rpe_bias is None and atom_mask is None:
        return F.scaled_dot_product_attention(query, key, value, is_causal=causal)
    bias = query.new_zeros((1, 1, 1, 1)) if rpe_bias is None else rpe_bias
    if causal:
        num_tokens = query.shape[-2]
        future = torch.ones(num_tokens, num_tokens, dtype=torch.bool, device=query.device).triu(1)
        bias = torch.where(future, float("-inf"), bias)
    if atom_mask is not None:
        query, key, value = (mask_rows(x, atom_mask) for x in (query, key, value))
        bias = torch.where(atom_mask[:, None, None, :], bias, float("-inf"))
        # A padded row sees every key, and is dropped at the end. No row is without keys (whose softmax is NaN
        # in some of torch's kernels), and none keeps what the bias held there.
        bias = torch.where(atom_mask[:, None, :, None], bias, 0.0)
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=bias.to(query.dtype))
    return mask_rows(out, atom_mask)
