"""Far sums: features on the scale of the exponential, and sums equal to those over explicit weights."""

import math
from collections.abc import Callable

import pytest
import torch

import molflt.nn.far_attention as far_attention
from molflt.nn.far import FarPositions
from molflt.nn.far_attention import far_features, far_sums
from molflt.nn.feature_maps import (
    HyperbolicRandomFeatures,
    OptimalPositiveFeatures,
    PositiveRandomFeatures,
    RandomProjectionFeatures,
)
from molflt.nn.kernel_feature_maps import EluFeatures

B, H, N, D, R = 2, 3, 7, 5, 11


@pytest.mark.parametrize(
    "make_map", [PositiveRandomFeatures, HyperbolicRandomFeatures, OptimalPositiveFeatures]
)
def test_far_features_estimate_the_exponential_itself(
    make_map: Callable[[int], RandomProjectionFeatures],
) -> None:
    """Mean over 2,000 redraws against exp(q.k / sqrt(D)), within 5 standard errors and 5 %."""
    feature_map = make_map(12)
    torch.manual_seed(6)
    feature_map.build(500, D)
    feature_map.double()
    query, key = 0.4 * torch.randn(2, 1, 1, N, D, dtype=torch.float64).expand(2, 1, 500, N, D)
    estimates = []
    for _ in range(4):
        feature_map.resample()
        features, key_features, log_scale = far_features(feature_map, query, key, None)
        estimates.append((features @ key_features.mT * log_scale.exp())[0])
    estimate = torch.cat(estimates)
    exact = (query[0, 0] @ key[0, 0].T / math.sqrt(D)).exp()
    error = estimate.std(0) / math.sqrt(len(estimate))
    assert bool(((estimate.mean(0) - exact).abs() < 5 * error).all())
    assert (error / exact).max() < 0.05


@pytest.mark.parametrize("block_elements", [1, 2 * B * N * D * (D + 1), 10**9])
def test_sums_in_blocks_of_heads_are_those_over_explicit_weights(
    block_elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """M summed cosine by cosine, elu(q) + 1 by hand; gradients of all that enters."""
    monkeypatch.setattr(far_attention, "BLOCK_ELEMENTS", block_elements)
    monkeypatch.setattr(far_attention, "MAX_PAIR_ATOMS", 0)
    generator = torch.Generator().manual_seed(0)
    shapes = [(B, H, N, D)] * 3 + [(B, 1, N, R), (B, H, R), (B, H, 1)]
    leaves = [
        torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes
    ]
    query, key, value, theta, weights, floor = leaves
    mask = torch.arange(N) < torch.tensor([[N], [4]])
    feature_map = EluFeatures()
    feature_map.build(H, D)

    far = FarPositions(torch.cat((theta.cos(), theta.sin()), dim=-1), weights.square(), floor.square())
    numerator, normalizer, log_scale = far_sums(query, key, value, far, mask, feature_map)

    phase = theta.unsqueeze(-2) - theta.unsqueeze(-3)
    modulation = floor.square().unsqueeze(-1) + (phase.cos() * weights.square()[:, :, None, None]).sum(-1)
    phi_q, phi_k = (torch.nn.functional.elu(x * D**-0.25) + 1 for x in (query, key))
    explicit = (phi_q @ phi_k.mT) * modulation * mask[:, None, None]
    assert bool((log_scale == 0).all())
    for ours, theirs in ((numerator, explicit @ value), (normalizer, explicit.sum(-1, keepdim=True))):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)
        upstream = torch.randn(ours.shape, generator=generator, dtype=torch.float64)
        one, other = (
            torch.autograd.grad((upstream * out).sum(), leaves, retain_graph=True, materialize_grads=True)
            for out in (ours, theirs)
        )
        for gradient, expected in zip(one, other, strict=True):
            torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-9)


def test_sums_pair_by_pair_are_those_along_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values and gradients, to rounding, with padded atoms among them."""
    torch.manual_seed(1)
    feature_map = PositiveRandomFeatures(13)
    feature_map.build(H, D)
    feature_map.double()
    mask = torch.arange(N) < torch.tensor([[N], [4]])
    shapes = [(B, H, N, D)] * 3 + [(B, 1, N, R), (B, H, R)]
    leaves = [torch.randn(shape, dtype=torch.float64).requires_grad_() for shape in shapes]

    def sums(limit: int) -> list[torch.Tensor]:
        monkeypatch.setattr(far_attention, "MAX_PAIR_ATOMS", limit)
        query, key, value, theta, weights = leaves
        basis = torch.cat((theta.cos(), theta.sin()), dim=-1)
        far = FarPositions(basis, weights.exp(), weights.exp().sum(-1, keepdim=True))
        found = far_sums(query, key, value * mask[:, None, :, None], far, mask, feature_map)
        return [*found, *torch.autograd.grad(found.numerator.sum() + found.normalizer.log().sum(), leaves)]

    for ours, theirs in zip(sums(N), sums(N - 1), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


def test_pairs_are_chosen_in_small_graphs_alone() -> None:
    """20 atoms of a slab go pair by pair; 300 do not, however many columns their cell has."""
    assert far_attention.pairs_are_cheaper(20, num_features=16, num_columns=19, width=9)
    assert not far_attention.pairs_are_cheaper(300, num_features=16, num_columns=10_000, width=9)
    # 200^2 (1 + 3 + 2) against 2 * 200 * 1 * 3 * 2
    assert not far_attention.pairs_are_cheaper(200, num_features=1, num_columns=3, width=2)
