"""Positive random features: unbiased, stabilised exactly, and falling in error as M^-1/2."""

import math

import pytest
import torch

from molflt.nn.feature_maps import (
    FeatureMap,
    HyperbolicRandomFeatures,
    OptimalPositiveFeatures,
    PositiveRandomFeatures,
    optimal_shape,
)
from molflt.nn.frequencies import resample_
from molflt.nn.functional import softmax_attention
from molflt.nn.operands import Operands

B, H, N, D, M = 2, 3, 11, 5, 14
EXPONENTIAL = [PositiveRandomFeatures, HyperbolicRandomFeatures, OptimalPositiveFeatures]


def built(feature_map: FeatureMap, num_heads: int = H, width: int = D) -> FeatureMap:
    """The map in float64 for `num_heads` heads of `width`."""
    feature_map.build(num_heads, width)
    return feature_map.double()


def weights_of(
    feature_map: FeatureMap, query: torch.Tensor, key: torch.Tensor, atom_mask=None
) -> torch.Tensor:
    """Attention weights, rows summing to one."""
    features = feature_map(Operands(query, key), atom_mask).evaluate()
    return features.query @ (features.key / features.key_sum).mT


def textbook_log_weights(feature_map: FeatureMap, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """log of the estimate of exp(x.y) as the papers write it, x = q D^-1/4 and y = k D^-1/4, `[B, H, N, N]`.

    Vectors of one head are seen by the projections of all heads.
    """
    w = feature_map.projection
    shape = (query.shape[0], w.shape[0], *query.shape[2:])
    x, y = (z.expand(shape) * D**-0.25 for z in (query, key))
    a = torch.zeros(*shape[:2], 1, 1, dtype=torch.float64)
    if isinstance(feature_map, OptimalPositiveFeatures):
        moment = (x.unsqueeze(3) + y.unsqueeze(2)).square().sum(-1).mean((-1, -2))
        a = optimal_shape(moment, D)[..., None, None].detach()
    log_x, log_y = (
        D / 4 * (1 - 4 * a).log()
        + a * w.square().sum(-1).unsqueeze(-2)
        + (1 - 4 * a).sqrt() * (z @ w.mT)
        - z.square().sum(-1, keepdim=True) / 2
        for z in (x, y)
    )
    return (log_x.unsqueeze(3) + log_y.unsqueeze(2)).logsumexp(-1) - math.log(w.shape[-2])


@pytest.mark.parametrize("kind", EXPONENTIAL)
def test_stabilised_features_give_the_textbook_weights_under_the_same_draws(kind):
    torch.manual_seed(0)
    feature_map = built(kind(M))
    query, key = torch.randn(2, B, H, N, D, dtype=torch.float64)
    expected = textbook_log_weights(feature_map, query, key).softmax(-1)
    torch.testing.assert_close(weights_of(feature_map, query, key), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", EXPONENTIAL)
def test_the_mean_of_the_textbook_estimate_over_redraws_is_the_exponential(kind):
    """Within 4 standard errors over 6,000 projections of independent heads, for every pair of tokens."""
    torch.manual_seed(1)
    redraws = 6000
    feature_map = built(kind(10), num_heads=redraws)
    query, key = 0.7 * torch.randn(2, 2, 1, 3, D, dtype=torch.float64)
    estimates = textbook_log_weights(feature_map, query, key).exp()
    exact = (query[:, 0] @ key[:, 0].mT / D**0.5).exp()
    error = estimates.mean(1) - exact
    standard_error = estimates.std(1) / redraws**0.5
    assert (error.abs() < 4 * standard_error).all()
    assert (standard_error < 0.1 * exact).all()


@pytest.mark.parametrize("kind", EXPONENTIAL)
def test_the_error_of_attention_falls_as_one_over_the_square_root_of_m(kind):
    """RMS over 41 heads with projections of their own; the slope of four points has a spread of about
    0.03."""
    torch.manual_seed(2)
    query, key, value = 0.5 * torch.randn(3, 1, 1, 17, D, dtype=torch.float64)
    exact = softmax_attention(query, key, value)
    sizes = [64, 256, 1024, 4096]
    log_errors = []
    for size in sizes:
        feature_map = built(kind(size), num_heads=41)
        many = (1, 41, 17, D)
        out = weights_of(feature_map, query.expand(many), key.expand(many)) @ value
        log_errors.append((out - exact).square().mean().sqrt().log())
    slope = (log_errors[-1] - log_errors[0]) / math.log(sizes[-1] / sizes[0])
    assert -0.58 < slope < -0.42
    assert log_errors[-1].exp() < 0.02 * exact.std()


def test_variance_falls_from_positive_to_hyperbolic_to_optimal_features():
    """Relative variance of the estimate of exp(x.y) at equal M for x, y of length about 1.2, over 4,000
    heads."""
    variances = []
    for kind in EXPONENTIAL:
        torch.manual_seed(3)
        feature_map = built(kind(16), num_heads=4000)
        query, key = 1.2 * torch.randn(2, 2, 1, 3, D, dtype=torch.float64)
        estimates = textbook_log_weights(feature_map, query, key).exp()
        variances.append((estimates.var(1) / estimates.mean(1).square()).mean())
    assert variances[1] < 0.9 * variances[0]
    assert variances[2] < 0.7 * variances[0]


@pytest.mark.parametrize("kind", EXPONENTIAL)
def test_gradients_equal_those_of_the_textbook_weights(kind):
    torch.manual_seed(4)
    feature_map = built(kind(M))
    query, key = (torch.randn(B, H, N, D, dtype=torch.float64, requires_grad=True) for _ in range(2))
    weight = torch.randn(B, H, N, N, dtype=torch.float64)
    stabilised = (weights_of(feature_map, query, key) * weight).sum()
    textbook = textbook_log_weights(feature_map, query, key).softmax(-1)
    for ours, theirs in zip(
        torch.autograd.grad(stabilised, (query, key)),
        torch.autograd.grad((textbook * weight).sum(), (query, key)),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-11)


@pytest.mark.parametrize("kind", EXPONENTIAL)
def test_masked_keys_have_no_weight_and_a_graph_without_tokens_stays_finite(kind):
    torch.manual_seed(5)
    feature_map = built(kind(M))
    query, key = torch.randn(2, 3, H, N, D, dtype=torch.float64)
    key[:, :, 7:] *= 1e3
    atom_mask = torch.arange(N) < torch.tensor([[7], [11], [0]])
    weights = weights_of(feature_map, query, key, atom_mask)
    assert weights[0, ..., 7:].abs().max() == 0
    assert weights[2].abs().max() == 0
    alone = weights_of(feature_map, query[:1, :, :7], key[:1, :, :7])
    torch.testing.assert_close(weights[:1, :, :7, :7], alone, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", EXPONENTIAL)
def test_weights_are_finite_and_sum_to_one_for_huge_queries_and_keys(kind):
    torch.manual_seed(6)
    feature_map = kind(M)
    feature_map.build(H, D)
    query, key = (
        (100 * torch.randn(B, H, N, D)).requires_grad_(),
        (100 * torch.randn(B, H, N, D)).requires_grad_(),
    )
    weights = weights_of(feature_map, query, key)
    torch.testing.assert_close(weights.sum(-1), torch.ones(B, H, N))
    for gradient in torch.autograd.grad((weights * torch.randn(N, N)).sum(), (query, key)):
        assert gradient.isfinite().all()


def test_the_optimal_shape_minimises_the_second_moment():
    """Second moment of the estimate of exp(x.y) at |x + y|^2 = s: E log(1-4A) - E/2 log(1-8A) + 2
    (1-4A)/(1-8A) s."""
    for width, s in ((5, 0.3), (5, 4.0), (48, 17.0)):
        a = torch.linspace(-3, 0.124, 200001, dtype=torch.float64)
        objective = (
            width * (1 - 4 * a).log() - width / 2 * (1 - 8 * a).log() + 2 * (1 - 4 * a) / (1 - 8 * a) * s
        )
        best = a[objective.argmin()]
        torch.testing.assert_close(optimal_shape(torch.tensor(s).double(), width), best, rtol=0, atol=1e-4)
    assert optimal_shape(torch.zeros(1), 5).item() == 0


def test_rows_of_a_projection_are_orthogonal_within_blocks_and_hyperbolic_ones_come_in_pairs():
    torch.manual_seed(7)
    projection = built(PositiveRandomFeatures(2 * D + 1)).projection
    for start in (0, D):
        block = projection[:, start : start + D]
        gram = block @ block.mT
        off_diagonal = gram - torch.diag_embed(gram.diagonal(dim1=-2, dim2=-1))
        assert off_diagonal.abs().max() < 1e-5
        assert gram.diagonal(dim1=-2, dim2=-1).min() > 0.01
    pairs = built(HyperbolicRandomFeatures(M)).projection
    assert torch.equal(pairs[:, : M // 2], -pairs[:, M // 2 :])


def test_resampling_follows_the_generator_and_nothing_else_draws():
    feature_map = built(PositiveRandomFeatures(M))
    first = feature_map.projection.clone()
    feature_map(Operands(*torch.randn(2, B, H, N, D, dtype=torch.float64)))
    assert torch.equal(feature_map.projection, first)
    resample_(torch.nn.Sequential(feature_map), torch.Generator().manual_seed(3))
    second = feature_map.projection.clone()
    assert not torch.equal(first, second)
    feature_map.resample(torch.Generator().manual_seed(3))
    assert torch.equal(feature_map.projection, second)
    assert "projection" in feature_map.state_dict()


def test_a_map_is_refused_for_a_second_size_and_shared_at_its_own():
    feature_map = built(PositiveRandomFeatures(M))
    projection = feature_map.projection.clone()
    feature_map.build(H, D)
    assert torch.equal(feature_map.projection, projection)
    with pytest.raises(ValueError, match=r"built for \(num_heads, input_width\) = \(3, 5\)"):
        feature_map.build(H, D + 1)


def test_wrong_sizes_are_refused():
    with pytest.raises(ValueError, match="at least 1, got 0"):
        PositiveRandomFeatures(0)
    with pytest.raises(ValueError, match="even, got 7"):
        HyperbolicRandomFeatures(7)
    with pytest.raises(ValueError, match="no size yet"):
        PositiveRandomFeatures().resample()
    with pytest.raises(ValueError, match="can not be causal"):
        OptimalPositiveFeatures().require_causal()
