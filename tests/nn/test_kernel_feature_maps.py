"""Feature maps of other kernels against their closed forms, and their masks."""

import math

import pytest
import torch
import torch.nn.functional as F

from molflt.nn.functional import quadratic_linear_attention
from molflt.nn.kernel_feature_maps import (
    CosineReweighting,
    EluFeatures,
    ReLUFeatures,
    RFAArcCosineFeatures,
    RFAGaussianFeatures,
)
from molflt.nn.operands import FourierOperands, Operands
from molflt.nn.rpe import default_rpe

B, H, N, D, R, M = 2, 3, 11, 5, 7, 26
WIDTH = 2 * R + D


@pytest.fixture
def operands() -> FourierOperands:
    """Queries, keys and an RPE, float64."""
    torch.manual_seed(0)
    query, key = torch.randn(2, B, H, N, D, dtype=torch.float64)
    rpe = default_rpe(H, 3, num_frequencies=R, num_basis=2).double()
    return FourierOperands(query, key, rpe, rpe.basis(torch.randn(B, N, 3, dtype=torch.float64)))


def built(feature_map, num_heads=H, width=WIDTH):
    """The map in float64."""
    feature_map.build(num_heads, width)
    return feature_map.double()


def masked(mask_key, atom_mask):
    """Key features with padded rows zeroed."""
    return mask_key * atom_mask[:, None, :, None]


def test_relu_features_are_the_learned_projection_of_the_concatenation(operands):
    feature_map = built(ReLUFeatures(M, offset=0.25))
    atom_mask = torch.rand(B, N) < 0.6
    features = feature_map(operands, atom_mask)
    full_query, full_key = operands.concatenated()
    torch.testing.assert_close(features.query, F.relu(full_query @ feature_map.weight.mT) + 0.25)
    torch.testing.assert_close(
        features.key, masked(F.relu(full_key @ feature_map.weight.mT) + 0.25, atom_mask)
    )
    (gradient,) = torch.autograd.grad((features.query @ features.key.mT).sum(), feature_map.weight)
    assert (gradient.abs().sum((1, 2)) > 0).all()


def test_elu_features_are_those_of_the_concatenation(operands):
    atom_mask = torch.rand(B, N) < 0.6
    features = built(EluFeatures())(operands, atom_mask)
    full_query, full_key = operands.concatenated()
    torch.testing.assert_close(features.query, torch.where(full_query > 0, full_query + 1, full_query.exp()))
    expected = torch.where(full_key > 0, full_key + 1, full_key.exp())
    torch.testing.assert_close(features.key, masked(expected, atom_mask))
    assert features.query.min() > 0


def kernel_estimates(feature_map, redraws=4000):
    """phi(x).phi(y) of two pairs of 5-vectors under many heads' projections, and the scaled vectors."""
    torch.manual_seed(1)
    feature_map = built(feature_map, num_heads=redraws, width=D)
    x, y = (torch.randn(1, 1, 3, D, dtype=torch.float64).expand(1, redraws, 3, D) for _ in range(2))
    with torch.no_grad():
        feature_map.raw_temperature.fill_(0.3)
        features = feature_map(Operands(x, y))
        length = feature_map.temperature[0].sqrt()
    return (
        (features.query @ features.key.mT)[0],
        F.normalize(x[0, 0], dim=-1) * length,
        F.normalize(y[0, 0], dim=-1) * length,
    )


def assert_unbiased(estimates, expected):
    """The mean over heads is within 4 standard errors."""
    standard_error = estimates.std(0) / estimates.shape[0] ** 0.5
    assert ((estimates.mean(0) - expected).abs() < 4 * standard_error).all()
    assert standard_error.max() < 0.02 * expected.max()


def test_rfa_gaussian_features_estimate_the_gaussian_kernel():
    estimates, x, y = kernel_estimates(RFAGaussianFeatures(M))
    assert_unbiased(estimates, (-(x.unsqueeze(1) - y).square().sum(-1) / 2).exp())


def test_rfa_arc_cosine_features_estimate_the_arc_cosine_kernel():
    estimates, x, y = kernel_estimates(RFAArcCosineFeatures(M))
    norms = x.norm(dim=-1).unsqueeze(1) * y.norm(dim=-1)
    angle = (x @ y.T / norms).clamp(-1, 1).acos()
    assert_unbiased(estimates, norms * (angle.sin() + (math.pi - angle) * angle.cos()) / math.pi)


def test_rfa_gaussian_attention_tends_to_softmax_of_the_cosine_plus_the_rpe(operands):
    """At M = 40,000 the error is M^-1/2 times exp of the squared lengths, about 1."""
    feature_map = built(RFAGaussianFeatures(40_000))
    features = feature_map(operands)
    value = torch.randn(B, H, N, 2, dtype=torch.float64)
    out = quadratic_linear_attention(features.query, features.key, value)
    cosine = F.cosine_similarity(operands.query.unsqueeze(3), operands.key.unsqueeze(2), dim=-1)
    query_features, key_features = operands.rpe_features(operands.basis)
    logits = feature_map.temperature[:, None, None] * cosine + query_features @ key_features.mT
    assert (out - logits.softmax(-1) @ value).abs().max() < 0.1
    torch.testing.assert_close(feature_map.temperature, torch.ones(H, dtype=torch.float64))


def test_cosine_reweighting_decays_with_the_distance_of_real_tokens():
    query, key = torch.rand(2, B, H, N, D, dtype=torch.float64)
    atom_mask = torch.tensor([[True] * 7 + [False] * 4, [True, False] * 5 + [True]])
    features = CosineReweighting()(Operands(query, key), atom_mask)
    weights = features.query @ features.key.mT
    for graph in range(B):
        real = atom_mask[graph].nonzero().squeeze(1)
        index = torch.arange(len(real))
        decay = (math.pi / 2 * (index[:, None] - index) / len(real)).cos()
        expected = (query[graph][:, real] @ key[graph][:, real].mT) / D**0.5 * decay
        torch.testing.assert_close(weights[graph][:, real][..., real], expected)
        assert weights[graph][..., ~atom_mask[graph]].abs().max() == 0


def test_cosine_reweighting_with_a_fixed_length_ignores_how_many_tokens_there_are():
    query, key = torch.rand(2, B, H, N, D, dtype=torch.float64)
    feature_map = CosineReweighting(max_length=N)
    whole, part = (feature_map(Operands(q, k)) for q, k in ((query, key), (query[:, :, :7], key[:, :, :7])))
    torch.testing.assert_close(whole.key[:, :, :7], part.key)
    feature_map.require_causal()


def test_wrong_arguments_are_refused():
    with pytest.raises(ValueError, match=r"offset must not be negative, got -1\.0"):
        ReLUFeatures(offset=-1.0)
    with pytest.raises(ValueError, match="num_random_features must be at least 1, got 0"):
        ReLUFeatures(0)
    with pytest.raises(ValueError, match="even, got 5"):
        RFAGaussianFeatures(5)
    with pytest.raises(ValueError, match="max_length must be at least 1, got 0"):
        CosineReweighting(0)
    with pytest.raises(ValueError, match="needs a fixed max_length"):
        CosineReweighting().require_causal()
    with pytest.raises(ValueError, match="max_length=3 and got 4 tokens"):
        CosineReweighting(3)(Operands(*torch.rand(2, 1, 1, 4, 2)))


@pytest.mark.parametrize("kind", [RFAGaussianFeatures, RFAArcCosineFeatures])
def test_resetting_restores_the_temperature_and_draws_anew(kind):
    feature_map = built(kind(M))
    projection, temperature = feature_map.projection.clone(), feature_map.raw_temperature
    with torch.no_grad():
        temperature.add_(1)
    feature_map.reset_parameters()
    torch.testing.assert_close(feature_map.temperature, torch.ones(H, dtype=torch.float64))
    assert feature_map.raw_temperature is temperature
    assert not torch.equal(feature_map.projection, projection)
