"""Causal linear attention by chunks against its quadratic twin."""

import pytest
import torch

from molflt.nn.causal import (
    causal_linear_attention,
    causal_sums,
    exponential_causal_features,
    plain_causal_features,
    states_before,
)
from molflt.nn.functional import append_ones, normalize, quadratic_linear_attention

B, H, N, M, D, K = 2, 3, 23, 7, 5, 11


def masks() -> dict[str, torch.Tensor | None]:
    """No padding, at the end, at the start, and scattered with an empty graph."""
    index = torch.arange(N)
    scattered = torch.rand(B, N, generator=torch.Generator().manual_seed(0)) < 0.5
    scattered[0] = False
    return {
        "none": None,
        "end": index < torch.tensor([[N], [13]]),
        "start": index >= torch.tensor([[9], [0]]),
        "scattered": scattered,
    }


def exponential_attention(log_query, log_key, value, atom_mask, chunk_size):
    """Causal attention with the weights sum_m exp(log_query_im + log_key_jm)."""
    features = exponential_causal_features(log_query, log_key, atom_mask, chunk_size)
    sums = causal_sums(features, append_ones(value))
    return normalize(sums[..., :-1], sums[..., -1:])


@pytest.mark.parametrize("chunk_size", [1, 4, 23, 64])
@pytest.mark.parametrize("padding", ["none", "end", "start", "scattered"])
def test_chunks_equal_the_quadratic_twin_in_value_and_gradient(padding, chunk_size):
    torch.manual_seed(0)
    atom_mask = masks()[padding]
    arguments = [torch.rand(B, H, N, width, dtype=torch.float64, requires_grad=True) for width in (M, M, D)]
    weight = torch.randn(B, H, N, D, dtype=torch.float64)
    results = []
    for out in (
        causal_linear_attention(*arguments, atom_mask, chunk_size),
        quadratic_linear_attention(*arguments, atom_mask, causal=True),
    ):
        results.append([out, *torch.autograd.grad((out * weight).sum(), arguments)])
    for chunked, quadratic in zip(*results, strict=True):
        torch.testing.assert_close(chunked, quadratic, rtol=0, atol=1e-11)


@pytest.mark.parametrize("chunk_size", [1, 4, 23])
@pytest.mark.parametrize("padding", ["none", "end", "start", "scattered"])
def test_stabilised_exponentials_equal_the_quadratic_twin_in_value_and_gradient(padding, chunk_size):
    torch.manual_seed(1)
    atom_mask = masks()[padding]
    log_query, log_key, value = (
        (2 * torch.randn(B, H, N, width, dtype=torch.float64)).requires_grad_() for width in (M, M, D)
    )
    weight = torch.randn(B, H, N, D, dtype=torch.float64)
    if atom_mask is not None:
        weight = weight * atom_mask[:, None, :, None]
    results = []
    for out in (
        exponential_attention(log_query, log_key, value, atom_mask, chunk_size),
        quadratic_linear_attention(log_query.exp(), log_key.exp(), value, atom_mask, causal=True),
    ):
        out = out * weight
        results.append([out, *torch.autograd.grad(out.sum(), (log_query, log_key, value))])
    for chunked, quadratic in zip(*results, strict=True):
        torch.testing.assert_close(chunked, quadratic, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("chunk_size", [1, 4, 23])
def test_modulated_chunks_equal_the_quadratic_twin(chunk_size):
    torch.manual_seed(2)
    log_query, log_key, value = (torch.randn(B, H, N, width, dtype=torch.float64) for width in (M, M, D))
    alpha, beta = torch.randn(2, B, H, N, K, dtype=torch.float64)
    weights = ((log_query.exp() @ log_key.exp().mT) * (alpha @ beta.mT)).tril()
    plain = plain_causal_features(log_query.exp(), log_key.exp(), chunk_size)
    torch.testing.assert_close(causal_sums(plain, value, alpha, beta), weights @ value)
    stabilised = exponential_causal_features(log_query, log_key, None, chunk_size)
    sums = causal_sums(stabilised, append_ones(value), alpha, beta)
    expected = weights @ append_ones(value)
    torch.testing.assert_close(
        sums[..., :-1] * expected[..., -1:], expected[..., :-1] * sums[..., -1:], rtol=1e-9, atol=1e-8
    )


@pytest.mark.parametrize("scale", [1.0, 1e3])
def test_later_tokens_change_nothing_not_even_through_a_stabiliser(scale):
    """Log features of the future a thousand times those of the past leave the past as it was, in float32."""
    torch.manual_seed(3)
    log_query, log_key, value = (torch.randn(B, H, N, width) for width in (M, M, D))
    out = exponential_attention(log_query, log_key, value, None, chunk_size=4)
    now = 9
    log_key[:, :, now + 1 :] = scale * torch.randn(B, H, N - now - 1, M).abs()
    value[:, :, now + 1 :] = 1e3
    changed = exponential_attention(log_query, log_key, value, None, chunk_size=4)
    torch.testing.assert_close(changed[:, :, : now + 1], out[:, :, : now + 1], rtol=1e-6, atol=1e-6)
    assert (changed[:, :, now + 1 :] - out[:, :, now + 1 :]).abs().min() > 0
    assert changed.isfinite().all()


def test_the_normaliser_is_at_least_one_for_log_features_over_thousands():
    torch.manual_seed(4)
    log_query, log_key = 1e3 * torch.randn(2, B, H, N, M)
    features = exponential_causal_features(log_query, log_key, None, chunk_size=4)
    assert causal_sums(features, torch.ones(B, H, N, 1)).min() >= 1 - 1e-5


def test_states_follow_the_recurrence():
    torch.manual_seed(5)
    update = torch.randn(B, H, 13, M, D, dtype=torch.float64)
    decay = torch.rand(B, H, 13, M, dtype=torch.float64)
    states = states_before(update, decay)
    state = torch.zeros(B, H, M, D, dtype=torch.float64)
    for chunk in range(13):
        torch.testing.assert_close(states[:, :, chunk], state)
        state = decay[:, :, chunk, :, None] * state + update[:, :, chunk]
    torch.testing.assert_close(states_before(update, None)[:, :, -1], update[:, :, :-1].sum(2))


def test_causal_linear_attention_passes_gradcheck():
    torch.manual_seed(6)
    arguments = [torch.rand(1, 2, 5, width, dtype=torch.float64, requires_grad=True) for width in (3, 3, 2)]
    atom_mask = torch.tensor([[True, False, True, True, False]])
    assert torch.autograd.gradcheck(lambda *x: causal_linear_attention(*x, atom_mask, 2), arguments)
