"""Causal linear attention by prefix sums over chunks: token i sees the tokens j <= i.

Within a chunk of C tokens the weights are formed, `[C, C]`; what comes before the chunk enters through the
state sum_j phi(k_j) v_j^T of all earlier chunks. Cost O(N (C + M) D), memory O(N (C + M D log(N/C) / C)).

For features that are exponentials no single stabiliser of the keys will do: one taken over all keys lets a
large key of the future push those of the past to underflow. Here every reference is a running maximum (of log
phi_m over the keys that all queries of the chunk may see), and states are rescaled from one reference to the
next. A key that exceeds everything before its chunk by more than e^60 is capped at that within its own chunk,
not afterwards.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from molflt.nn.functional import (
    EPSILON,
    append_ones,
    exp_,
    kronecker,
    kronecker_blocks,
    mask_rows,
    normalize,
    recomputed,
)

CHUNK_SIZE = 64
LOWEST_LOG_FEATURE = -1e30
LARGEST_LOG_RATIO = 60.0


class CausalFeatures(NamedTuple):
    """Features in n chunks of C tokens, padded keys zeroed.

    Attributes:
        query: phi(q), `[B, H, n, C, M]`.
        key: phi(k) as the queries of the same chunk see it, `[B, H, n, C, M]`.
        state_key: phi(k) as it enters the state after the chunk, `[B, H, n, C, M]`.
        read_decay: what the state before the chunk is multiplied by when it is read, `[B, H, n, M]`; None is
            1.
        state_decay: and when it is carried on, `[B, H, n, M]`; None is 1.
    """

    query: Tensor
    key: Tensor
    state_key: Tensor
    read_decay: Tensor | None = None
    state_decay: Tensor | None = None


def to_chunks(
    x: Float[Tensor, "B H N E"], chunk_size: int, padding: float = 0.0
) -> Float[Tensor, "B H n C E"]:
    """Chunks of `chunk_size` rows, the last one filled up with `padding`."""
    num_chunks = (x.shape[-2] + chunk_size - 1) // chunk_size
    missing = num_chunks * chunk_size - x.shape[-2]
    return F.pad(x, (0, 0, 0, missing), value=padding).unflatten(-2, (num_chunks, chunk_size))


def plain_causal_features(
    query_features: Float[Tensor, "B H N M"], key_features: Float[Tensor, "B H N M"], chunk_size: int
) -> CausalFeatures:
    """Features that need no stabiliser, or have one that is no function of other tokens."""
    key = to_chunks(key_features, chunk_size)
    return CausalFeatures(to_chunks(query_features, chunk_size), key, key)


def exponential_causal_features(
    query_log_features: Float[Tensor, "B H N M"],
    key_log_features: Float[Tensor, "B H N M"],
    atom_mask: Bool[Tensor, "B N"] | None,
    chunk_size: int,
) -> CausalFeatures:
    """Stabilised exp(log features).

    Args:
        query_log_features, key_log_features: log phi, up to a constant per query and a constant per feature.
        atom_mask: true at real tokens.
        chunk_size: C.
    """
    if atom_mask is not None:
        key_log_features = key_log_features.masked_fill(~atom_mask[:, None, :, None], float("-inf"))
    log_key = to_chunks(key_log_features, chunk_size, padding=float("-inf"))
    detached = log_key.detach()
    state_reference = detached.amax(-2).cummax(-2).values.clamp_min(LOWEST_LOG_FEATURE)
    before = F.pad(state_reference[:, :, :-1], (0, 0, 1, 0), value=LOWEST_LOG_FEATURE)
    if atom_mask is None:
        first_key = detached[..., 0, :]
    else:
        missing = detached.shape[2] * chunk_size - atom_mask.shape[-1]
        chunk_mask = F.pad(atom_mask, (0, missing)).unflatten(-1, (detached.shape[2], chunk_size))
        is_first = chunk_mask & (chunk_mask.cumsum(-1) == 1)
        first_key = detached.masked_fill(~is_first[:, None, ..., None], float("-inf")).amax(-2)
    read_reference = torch.maximum(before, first_key)
    log_query = to_chunks(query_log_features, chunk_size) + read_reference.unsqueeze(-2)
    return CausalFeatures(
        query=log_query.softmax(-1),
        key=exp_((log_key - read_reference.unsqueeze(-2)).clamp_max(LARGEST_LOG_RATIO)),
        state_key=exp_(log_key - state_reference.unsqueeze(-2)),
        read_decay=(before - read_reference).exp(),
        state_decay=(before - state_reference).exp(),
    )


def states_before(
    update: Float[Tensor, "B H n M E"], decay: Float[Tensor, "B H n M"] | None
) -> Float[Tensor, "B H n M E"]:
    """S_{c-1} for every chunk c, where S_c = decay_c S_{c-1} + update_c and S_{-1} = 0.

    `decay` gets no gradient where the code is compiled or exported.
    """
    if decay is None:
        return one_chunk_later(update.cumsum(2))
    return _compiled_scan(update, decay) if torch.compiler.is_compiling() else decayed_scan(update, decay)


def one_chunk_later(state: Float[Tensor, "B H n M E"]) -> Float[Tensor, "B H n M E"]:
    """The states of the chunks before, zero for the first."""
    return F.pad(state[:, :, :-1], (0, 0, 0, 0, 1, 0))


def decayed_scan(
    update: Float[Tensor, "B H n M E"], decay: Float[Tensor, "B H n M"]
) -> Float[Tensor, "B H n M E"]:
    """`states_before` with decays, in log2(n) steps."""
    # Doubling: after the step of length s, state_c holds the last 2 s updates up to c.
    state, step = update, 1
    while step < update.shape[2]:
        earlier = F.pad(state[:, :, :-step], (0, 0, 0, 0, step, 0))
        state = torch.addcmul(state, decay.unsqueeze(-1), earlier)
        decay = decay * F.pad(decay[:, :, :-step], (0, 0, step, 0))
        step *= 2
    return one_chunk_later(state)


# An operator to the compiler, which would trace the loop and compile anew for each number of steps.
_compiled_scan = torch.library.custom_op(
    "molflt::decayed_scan",
    lambda update, decay: decayed_scan(update, decay).contiguous(),
    mutates_args=(),
    schema="(Tensor update, Tensor decay) -> Tensor",
)
_compiled_scan.register_fake(lambda update, decay: torch.empty_like(update).contiguous())


def _save_decay(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(inputs[1])


def _scan_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
    # Chunk c feeds the chunks after it as those before feed it: the same scan, from the end.
    (decay,) = ctx.saved_tensors
    return _compiled_scan(gradient.flip(2), decay.flip(2)).flip(2), None


_compiled_scan.register_autograd(_scan_backward, setup_context=_save_decay)


def causal_sums(
    features: CausalFeatures,
    value: Float[Tensor, "B H N E"],
    query_modulation: Float[Tensor, "B H N K"] | None = None,
    key_modulation: Float[Tensor, "B H N K"] | None = None,
) -> Float[Tensor, "B H N E"]:
    """sum_{j <= i} a_ij v_j, a_ij = phi(q_i).phi(k_j) (times sum_r alpha_ir beta_jr, when modulated)."""
    num_tokens, chunk_size = value.shape[-2], features.query.shape[-2]
    value = to_chunks(value, chunk_size)
    weights = features.query @ features.key.transpose(-1, -2)
    if query_modulation is None or key_modulation is None:
        total = weights.tril() @ value + sums_of_earlier_chunks(features, value)
    else:
        alpha, beta = to_chunks(query_modulation, chunk_size), to_chunks(key_modulation, chunk_size)
        total = (weights * (alpha @ beta.transpose(-1, -2))).tril() @ value
        for a, b in kronecker_blocks(alpha, beta, features.query.shape[-1]):
            total = total + recomputed(modulated_sums_of_earlier_chunks, features, value, a, b)
    return total.flatten(2, 3)[:, :, :num_tokens]


def sums_of_earlier_chunks(
    features: CausalFeatures, value: Float[Tensor, "B H n C E"]
) -> Float[Tensor, "B H n C E"]:
    """sum_j a_ij v_j over the tokens j of all chunks before that of token i."""
    state = states_before(features.state_key.transpose(-1, -2) @ value, features.state_decay)
    if features.read_decay is not None:
        state = state * features.read_decay.unsqueeze(-1)
    return features.query @ state


def modulated_sums_of_earlier_chunks(
    features: CausalFeatures,
    value: Float[Tensor, "B H n C E"],
    alpha: Float[Tensor, "B H n C K"],
    beta: Float[Tensor, "B H n C K"],
) -> Float[Tensor, "B H n C E"]:
    """The same with the weights times sum_r alpha_ir beta_jr."""
    read_decay, state_decay = (
        None if decay is None else decay.repeat_interleave(alpha.shape[-1], dim=-1)
        for decay in (features.read_decay, features.state_decay)
    )
    query = kronecker(features.query, alpha)
    state_key = kronecker(features.state_key, beta)
    return sums_of_earlier_chunks(CausalFeatures(query, state_key, state_key, read_decay, state_decay), value)


def causal_linear_attention(
    query_features: Float[Tensor, "B H N M"],
    key_features: Float[Tensor, "B H N M"],
    value: Float[Tensor, "B H N D"],
    atom_mask: Bool[Tensor, "B N"] | None = None,
    chunk_size: int = CHUNK_SIZE,
    eps: float = EPSILON,
) -> Float[Tensor, "B H N D"]:
    """Attention with weights phi(q_i).phi(k_j) for j <= i and 0 for j > i, at a cost linear in N.

    Arguments as in `linear_attention`; its twin is `quadratic_linear_attention(..., causal=True)`.
    """
    query_features = mask_rows(query_features, atom_mask)
    key_features = mask_rows(key_features, atom_mask)
    features = plain_causal_features(query_features, key_features, chunk_size)
    sums = causal_sums(features, append_ones(mask_rows(value, atom_mask)))
    return normalize(sums[..., :-1], sums[..., -1:], eps)
