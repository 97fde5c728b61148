"""Linear attention against its quadratic rewriting, and softmax attention against an explicit softmax."""

import pytest
import torch
import torch.nn.functional as F

from molflt.nn.functional import (
    linear_attention,
    modulated_linear_sums,
    normalize,
    quadratic_linear_attention,
    softmax_attention,
)

B, H, N, M, D, K = 3, 2, 11, 7, 5, 13


def random_features(*names_to_width: int) -> list[torch.Tensor]:
    """Positive tensors `[B, H, N, width]` in float64."""
    return [torch.rand(B, H, N, width, dtype=torch.float64) for width in names_to_width]


def random_mask() -> torch.Tensor:
    """Scattered padding; the last graph is all padding."""
    atom_mask = torch.rand(B, N, generator=torch.Generator().manual_seed(0)) < 0.6
    atom_mask[-1] = False
    return atom_mask


@pytest.mark.parametrize("masked", [False, True])
def test_linear_attention_equals_its_quadratic_rewriting_in_value_and_gradient(masked):
    torch.manual_seed(0)
    atom_mask = random_mask() if masked else None
    arguments = [x.requires_grad_() for x in random_features(M, M, D)]
    weight = torch.randn(B, H, N, D, dtype=torch.float64)
    results = []
    for attention in (linear_attention, quadratic_linear_attention):
        out = attention(*arguments, atom_mask)
        results.append([out, *torch.autograd.grad((out * weight).sum(), arguments)])
    for linear, quadratic in zip(*results, strict=True):
        torch.testing.assert_close(linear, quadratic, rtol=0, atol=1e-12)
    assert results[0][0].abs().max() > 0.1


def test_weights_are_normalised_over_real_keys_only():
    """With equal values everywhere the output of a real query is that value, whatever the features."""
    query, key = random_features(M, M)
    atom_mask = random_mask()
    out = linear_attention(query, key, torch.full((B, H, N, D), 3.0, dtype=torch.float64), atom_mask)
    real = atom_mask[:, None, :, None].expand_as(out)
    torch.testing.assert_close(out[real], torch.full_like(out[real], 3.0))
    assert out[~real].abs().max() == 0


@pytest.mark.parametrize("content", [1e30, float("nan"), float("inf")])
@pytest.mark.parametrize("attention", [linear_attention, softmax_attention])
def test_what_padding_holds_changes_no_value_and_no_gradient(attention, content):
    torch.manual_seed(1)
    atom_mask = random_mask()
    clean = [torch.where(atom_mask[:, None, :, None], x, 0.0) for x in random_features(M, M, D)]
    dirty = [torch.where(atom_mask[:, None, :, None], x, content) for x in clean]
    weight = torch.randn(B, H, N, D, dtype=torch.float64)
    results = []
    for arguments in (clean, dirty):
        arguments = [x.requires_grad_() for x in arguments]
        out = attention(*arguments, atom_mask=atom_mask)
        results.append([out, *torch.autograd.grad((out * weight).sum(), arguments)])
    for with_zeros, with_content in zip(*results, strict=True):
        assert torch.equal(with_zeros, with_content)
        assert with_content.permute(0, 2, 1, 3)[~atom_mask].abs().max() == 0


def test_what_the_bias_holds_at_padding_changes_nothing():
    torch.manual_seed(8)
    atom_mask = random_mask()
    pairs = atom_mask[:, None, :, None] & atom_mask[:, None, None, :]
    query, key, value = random_features(M, M, D)
    bias = torch.randn(B, H, N, N, dtype=torch.float64)
    weight = torch.randn(B, H, N, D, dtype=torch.float64)
    results = []
    for content in (0.0, float("nan")):
        arguments = [x.clone().requires_grad_() for x in (query, key, value, bias.where(pairs, content))]
        out = softmax_attention(*arguments, atom_mask)
        results.append([out, *torch.autograd.grad((out * weight).sum(), arguments)])
    for with_zeros, with_content in zip(*results, strict=True):
        assert torch.equal(with_zeros, with_content)


def test_functionals_pass_gradcheck():
    torch.manual_seed(2)
    atom_mask = random_mask()[:2, :5]
    query, key, value = (x[:2, :, :5].requires_grad_() for x in random_features(M, M, D))
    alpha, beta = (torch.randn(2, H, 5, 3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    bias = torch.randn(2, H, 5, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda *x: linear_attention(*x, atom_mask), (query, key, value))
    assert torch.autograd.gradcheck(modulated_linear_sums, (query, key, value, alpha, beta))
    assert torch.autograd.gradcheck(lambda *x: softmax_attention(*x, atom_mask), (query, key, value, bias))


def test_modulated_sums_equal_the_explicit_weights():
    torch.manual_seed(3)
    query, key, value = random_features(M, M, D)
    alpha, beta = torch.randn(2, B, H, N, K, dtype=torch.float64)
    weights = (query @ key.mT) * (alpha @ beta.mT)
    torch.testing.assert_close(modulated_linear_sums(query, key, value, alpha, beta), weights @ value)


def test_modulated_sums_keep_no_kronecker_features_for_the_backward_pass():
    """What autograd saves is far smaller than one tensor of M K features per token."""
    query, key, value = (x.requires_grad_() for x in random_features(64, 64, D))
    alpha, beta = torch.randn(2, B, H, N, K, dtype=torch.float64)
    saved = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        total = modulated_linear_sums(query, key, value, alpha, beta)
    assert total.requires_grad
    assert sum(tensor.numel() for tensor in saved.values()) < B * H * N * 64 * K / 4


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_softmax_attention_equals_an_explicit_softmax(masked, causal):
    torch.manual_seed(4)
    query, key, value = torch.randn(3, B, H, N, D, dtype=torch.float64)
    bias = torch.randn(1, H, N, N, dtype=torch.float64)
    atom_mask = random_mask() if masked else None
    logits = query @ key.mT / D**0.5 + bias
    hidden = torch.ones(N, N, dtype=torch.bool).triu(1) if causal else torch.zeros(N, N, dtype=torch.bool)
    if atom_mask is not None:
        hidden = hidden | ~atom_mask[:, None, None, :]
    expected = logits.masked_fill(hidden, float("-inf")).softmax(-1) @ value
    if atom_mask is not None:
        expected = torch.where(atom_mask[:, None, :, None], expected, 0.0)
    torch.testing.assert_close(softmax_attention(query, key, value, bias, atom_mask, causal), expected)


def test_softmax_attention_without_bias_equals_torch():
    query, key, value = torch.randn(3, B, H, N, D, dtype=torch.float64)
    expected = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    torch.testing.assert_close(softmax_attention(query, key, value, causal=True), expected)
    expected = F.scaled_dot_product_attention(query, key, value)
    torch.testing.assert_close(softmax_attention(query, key, value), expected)


def test_a_normaliser_smaller_than_epsilon_counts_as_epsilon():
    numerator = torch.tensor([[[[2.0], [2.0], [2.0], [2.0]]]])
    normalizer = torch.tensor([[[[4.0], [-4.0], [1e-3], [-1e-3]]]])
    expected = torch.tensor([[[[0.5], [-0.5], [200.0], [200.0]]]])
    torch.testing.assert_close(normalize(numerator, normalizer, eps=0.01), expected)
