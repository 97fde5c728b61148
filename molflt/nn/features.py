"""Features of queries and keys, and the attention they make.

A feature map returns one of two things. `PlainFeatures` holds phi(q) and phi(k). `LogFeatures` holds what phi
is the exponential of, as matrix products still to be done, and stabilises exactly: per graph, head and
feature the largest log feature c_m of the real keys moves from the keys to the queries, which a softmax then
normalises,

    a_ij / sum_j a_ij = sum_m softmax_m(log phi_m(q_i) + c_m + log z_m) phi_m(k_j) e^-c_m / z_m,
    z_m = sum_j phi_m(k_j) e^-c_m >= 1.

Factors of the query alone and factors of the feature alone cancel and are not computed. Nothing overflows,
the normaliser can not vanish, and no epsilon enters.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from molflt.nn.causal import (
    LOWEST_LOG_FEATURE,
    causal_sums,
    exponential_causal_features,
    plain_causal_features,
)
from molflt.nn.functional import append_ones, exp_, linear_sums, modulated_linear_sums
from molflt.nn.operands import Projection

BLOCK_ELEMENTS = 2**18
"""Features that each thread of a CPU computes at a time, about: 1 MiB of float32, which caches hold."""


class Modulations(NamedTuple):
    """Factors alpha and beta of M(r_i - r_j) = sum_r alpha_ir beta_jr, `[B, H, N, K]` each."""

    query: Tensor
    key: Tensor


class Sums(NamedTuple):
    """What attention is the quotient of; a normaliser of None is 1."""

    numerator: Tensor
    normalizer: Tensor | None


class Features(ABC):
    """Features of a batch, able to attend."""

    @abstractmethod
    def attend(self, value: Float[Tensor, "B H N D"], modulations: Modulations | None) -> Sums:
        """sum_j a_ij v_j and sum_j a_ij over all real tokens j."""

    @abstractmethod
    def attend_causal(
        self, value: Float[Tensor, "B H N D"], modulations: Modulations | None, chunk_size: int
    ) -> Sums:
        """The same over the real tokens j <= i."""


def split_ones(sums: Float[Tensor, "B H N E"]) -> Sums:
    """Numerator and normaliser of the sums over [v, 1]."""
    return Sums(sums[..., :-1], sums[..., -1:])


def join_heads(blocks: Iterable[Tensor], like: Float[Tensor, "B H N E"]) -> Float[Tensor, "B H N E"]:
    """The blocks of consecutive heads as one tensor of the shape of `like`."""
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        parts = list(blocks)
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
    # Each block goes to its place and is freed, instead of all of them being held twice.
    joined, first = None, 0
    for block in blocks:
        if block.shape == like.shape:
            return block
        joined = block.new_empty(like.shape) if joined is None else joined
        joined[:, first : first + block.shape[1]] = block
        first += block.shape[1]
    assert joined is not None
    return joined


@dataclass(frozen=True)
class PlainFeatures(Features):
    """phi(q) and phi(k) `[B, H, N, M]`, padded keys zeroed."""

    query: Tensor
    key: Tensor

    def attend(self, value: Float[Tensor, "B H N D"], modulations: Modulations | None) -> Sums:
        if modulations is None:
            return Sums(*linear_sums(self.query, self.key, value))
        return split_ones(modulated_linear_sums(self.query, self.key, append_ones(value), *modulations))

    def attend_causal(
        self, value: Float[Tensor, "B H N D"], modulations: Modulations | None, chunk_size: int
    ) -> Sums:
        features = plain_causal_features(self.query, self.key, chunk_size)
        return split_ones(causal_sums(features, append_ones(value), *(modulations or (None, None))))


class StabilisedFeatures(NamedTuple):
    """Features whose attention weights query @ (key / key_sum)^T sum to one in each row.

    Attributes:
        query, key: `[B, H, N, M]`, padded keys zero.
        key_sum: `[B, H, 1, M]`, at least 1 in a graph with tokens.
    """

    query: Tensor
    key: Tensor
    key_sum: Tensor

    def attend(self, value: Float[Tensor, "B H N D"]) -> Float[Tensor, "B H N D"]:
        """Attention over all real tokens."""
        return self.query @ ((self.key.transpose(-1, -2) @ value) / self.key_sum.transpose(-1, -2))


@dataclass(frozen=True)
class LogFeatures(Features):
    """log phi_m(q) = (W q^)_m + query_bias_m and log phi_m(k) = (W k^)_m + key_bias.

    Attributes:
        projection: W q^ and W k^.
        key_bias: `[B, H, N, 1]`, minus infinity at padding.
        query_bias: `[B, H, 1, M]`, of queries and keys together; None is 0.
        atom_mask: true at real tokens.
    """

    projection: Projection
    key_bias: Tensor
    query_bias: Tensor | None
    atom_mask: Tensor | None

    def evaluate(self) -> StabilisedFeatures:
        """The features of all heads at once."""
        log_key = self.projection.key(self.key_bias)
        # The floor and the lower bound of z act only in graphs without tokens.
        ceiling = log_key.detach().amax(-2, keepdim=True).clamp_min(LOWEST_LOG_FEATURE)
        key = exp_(log_key - ceiling)
        key_sum = key.sum(-2, keepdim=True).clamp_min(0.5)
        bias = ceiling + key_sum.log()
        if self.query_bias is not None:
            bias = bias + self.query_bias
        return StabilisedFeatures(self.projection.query(bias).softmax(-1), key, key_sum)

    def attend(self, value: Float[Tensor, "B H N D"], modulations: Modulations | None) -> Sums:
        if modulations is None:
            parts = self.split(value, None)
            return Sums(join_heads((part.attend_at_once(v) for part, v, _ in parts), value), None)
        value = append_ones(value)
        blocks = []
        for part, v, factors in self.split(value, modulations):
            query, key, key_sum = part.evaluate()
            blocks.append(modulated_linear_sums(query, key / key_sum, v, *factors))
        return split_ones(torch.cat(blocks, dim=1))

    def attend_at_once(self, value: Float[Tensor, "B H N D"]) -> Float[Tensor, "B H N D"]:
        """Attention over all real tokens, without blocks."""
        if not self.projection.shares_weights():
            return self.evaluate().attend(value)
        bias = None if self.query_bias is None else self.query_bias.transpose(0, 1)
        heads_first = replace(
            self,
            projection=self.projection.with_heads_first(),
            key_bias=self.key_bias.transpose(0, 1),
            query_bias=bias,
        )
        return heads_first.evaluate().attend(value.transpose(0, 1)).transpose(0, 1)

    def attend_causal(
        self, value: Float[Tensor, "B H N D"], modulations: Modulations | None, chunk_size: int
    ) -> Sums:
        zero = self.key_bias.new_zeros(1, 1, 1, 1)
        blocks = []
        for part, v, factors in self.split(append_ones(value), modulations):
            log_query = part.projection.query(zero if part.query_bias is None else part.query_bias)
            log_key = part.projection.key(part.key_bias)
            features = exponential_causal_features(log_query, log_key, part.atom_mask, chunk_size)
            blocks.append(causal_sums(features, v, *factors))
        return split_ones(torch.cat(blocks, dim=1))

    def heads_per_block(self) -> int:
        """Heads to compute at a time.

        On a CPU few enough for their features to stay in cache, which also keeps the intermediate results of
        long inputs from growing with the number of heads; elsewhere, and compiled, all at once.
        """
        num_graphs, num_heads, num_tokens, _ = self.key_bias.shape
        if self.key_bias.device.type != "cpu" or torch.compiler.is_compiling():
            return num_heads
        size = num_graphs * num_heads * num_tokens * self.projection.num_features
        num_blocks = max(1, math.ceil(size / (BLOCK_ELEMENTS * torch.get_num_threads())))
        return max(1, num_heads // num_blocks)

    def split(
        self, value: Float[Tensor, "B H N E"], modulations: Modulations | None
    ) -> Iterator[tuple[LogFeatures, Tensor, tuple[Tensor, ...]]]:
        """Features, values and the two modulations (an empty tuple if None), some heads at a time."""
        size = self.heads_per_block()
        if size == value.shape[1]:
            yield self, value, modulations or ()
            return
        key_biases, values = self.key_bias.split(size, dim=1), value.split(size, dim=1)
        query_biases = [None] * len(values) if self.query_bias is None else self.query_bias.split(size, dim=1)
        factors: list[tuple[Tensor, ...]] = [()] * len(values)
        if modulations is not None:
            factors = list(zip(*(factor.split(size, dim=1) for factor in modulations), strict=True))
        for projection, key_bias, query_bias, v, factor in zip(
            self.projection.split(size), key_biases, query_biases, values, factors, strict=True
        ):
            yield LogFeatures(projection, key_bias, query_bias, self.atom_mask), v, factor
