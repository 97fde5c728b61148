"""Diagnostics: measured errors and effective sample size."""

import jaxtyping
import pytest
import torch

from molflt.nn.attention import FLTAttention
from molflt.nn.couplings import AdditiveCoupling, Coupling, MultiplicativeCoupling, NoCoupling
from molflt.nn.diagnostics import (
    attention_error,
    effective_sample_size,
    rpe_bias_error,
)
from molflt.nn.feature_maps import PositiveRandomFeatures
from molflt.nn.frequencies import GaussianFrequencies
from molflt.nn.kernel_spectra import ShiftInvariantKernelSpectrum
from molflt.nn.kernels import GaussianKernel
from molflt.nn.matched_frequencies import MatchedKernelFrequencies
from molflt.nn.rpe import FourierRPE, default_rpe


def test_bias_error_is_the_largest_over_real_pairs_of_each_graph_and_head() -> None:
    torch.manual_seed(0)
    rpe, pos = default_rpe(3, 3).double(), torch.randn(2, 5, 3, dtype=torch.float64)
    atom_mask = torch.tensor([[True] * 5, [True, True, False, True, False]])
    error = rpe_bias_error(rpe, pos, atom_mask)
    query, key = rpe(pos[1:, [0, 1, 3]])
    expected = (query @ key.mT - rpe.closed_form_bias(pos[1:, [0, 1, 3]])).abs().amax((-1, -2))
    torch.testing.assert_close(error[1:], expected, rtol=1e-9, atol=0)
    torch.testing.assert_close(error[:1], rpe_bias_error(rpe, pos[:1]), rtol=1e-9, atol=0)
    assert not error.requires_grad


def test_bias_error_ignores_nan_in_the_padding() -> None:
    rpe, pos = default_rpe(3, 3), torch.zeros(1, 3, 3)
    pos[0, 2] = torch.nan
    assert rpe_bias_error(rpe, pos, torch.tensor([[True, True, False]])).isfinite().all()


def test_effective_sample_size_counts_the_frequencies_that_carry_weight() -> None:
    kernel = GaussianKernel(1, 2, 1.3)
    equal = FourierRPE(MatchedKernelFrequencies(kernel, 13), ShiftInvariantKernelSpectrum(kernel))
    torch.testing.assert_close(effective_sample_size(equal), torch.tensor([13.0], dtype=torch.float64))
    # A density 25 times wider than the spectrum in 3 dimensions hits it almost never.
    kernel = GaussianKernel(1, 3, 1.3)
    sampler = GaussianFrequencies(1, 64, 3, 3.0, generator=torch.Generator().manual_seed(0))
    assert effective_sample_size(FourierRPE(sampler, ShiftInvariantKernelSpectrum(kernel))).item() < 2


def test_effective_sample_size_equals_a_value_by_hand() -> None:
    rpe = default_rpe(2, 3)
    weights = rpe.importance_weights().detach().double().abs()
    expected = torch.stack([head.sum() ** 2 / (head**2).sum() for head in weights])
    torch.testing.assert_close(effective_sample_size(rpe), expected)


def test_graphs_without_real_tokens_have_no_error() -> None:
    layer, x, pos = FLTAttention(12, 3), torch.randn(2, 5, 12), torch.randn(2, 5, 3)
    assert layer.rpe is not None
    atom_mask = torch.tensor([[False] * 5, [True] * 5])
    error = attention_error(layer, x, pos, atom_mask)
    assert (error[0] == 0).all()
    assert (error[1] > 0).all()
    assert (rpe_bias_error(layer.rpe, pos, atom_mask)[0] == 0).all()
    assert torch.equal(attention_error(layer, x[:, :0], pos[:, :0]), torch.zeros(2, 3))
    assert torch.equal(rpe_bias_error(layer.rpe, pos[:, :0]), torch.zeros(2, 3))


def test_shapes_that_do_not_belong_together_are_refused() -> None:
    layer, x, pos = FLTAttention(12, 3), torch.randn(2, 5, 12), torch.randn(2, 5, 3)
    atom_mask = torch.ones(2, 5)
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        with pytest.raises(
            ValueError, match=r"pos must have shape \[B, N, 3\], got \[5, 3\]; pass pos\[None\]"
        ):
            rpe_bias_error(layer.rpe, pos[0])
        with pytest.raises(ValueError, match=r"pos must have shape \[B, N, 3\], got \[2, 5, 2\]; its last"):
            rpe_bias_error(layer.rpe, pos[..., :2])
        for mask in (atom_mask, atom_mask[:, :4].bool()):
            with pytest.raises(ValueError, match=r"atom_mask must be bool of shape \[2, 5\]"):
                rpe_bias_error(layer.rpe, pos, mask)
            with pytest.raises(ValueError, match=r"atom_mask must be bool of shape \[2, 5\]"):
                attention_error(layer, x, pos, mask)
        with pytest.raises(ValueError, match=r"x must have shape \[B, N, 12\], got \[5, 12\]"):
            attention_error(layer, x[0], pos[0])
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)


COUPLINGS = [AdditiveCoupling(), MultiplicativeCoupling(floor_ratio=0.7), NoCoupling()]


def small_attention(coupling: Coupling, num_random_features: int, causal: bool) -> FLTAttention:
    """A layer whose features are near their limit: small queries, keys and RPE."""
    torch.manual_seed(0)
    rpe = None if isinstance(coupling, NoCoupling) else default_rpe(3, 3, width_range=(2.0, 5.0))
    features = PositiveRandomFeatures(num_random_features)
    layer = FLTAttention(12, 3, rpe=rpe, feature_map=features, coupling=coupling, causal=causal).double()
    with torch.no_grad():
        layer.query.weight *= 0.3
        layer.key.weight *= 0.3
        if rpe is not None:
            rpe.spectrum.amplitude *= 0.1
    return layer


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("coupling", COUPLINGS, ids=lambda coupling: type(coupling).__name__)
def test_attention_error_falls_with_m_to_the_minus_one_half(coupling: Coupling, causal: bool) -> None:
    torch.manual_seed(1)
    x, pos = torch.randn(5, 13, 12, dtype=torch.float64), torch.randn(5, 13, 3, dtype=torch.float64)
    few, many = (
        attention_error(small_attention(coupling, count, causal), x, pos).square().mean().sqrt()
        for count in (64, 64 * 64)
    )
    # The factor is 8 in the mean; 15 graphs and heads share 3 projections, which leaves it a factor of 2.
    assert 4 < few / many < 16
    assert many < 0.05


@pytest.mark.parametrize("coupling", COUPLINGS, ids=lambda coupling: type(coupling).__name__)
def test_attention_error_sees_real_tokens_only(coupling: Coupling) -> None:
    layer = small_attention(coupling, 11, False)
    x, pos = torch.randn(2, 5, 12, dtype=torch.float64), torch.randn(2, 5, 3, dtype=torch.float64)
    atom_mask = torch.tensor([[True] * 5, [True, True, True, False, False]])
    alone = attention_error(layer, x[1:, :3], pos[1:, :3])
    x[1, 3:], pos[1, 3:] = torch.nan, torch.nan
    torch.testing.assert_close(attention_error(layer, x, pos, atom_mask)[1:], alone, rtol=1e-9, atol=0)
