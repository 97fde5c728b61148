"""Spherical quadrature: directional exactness, rotation invariance at the promised R, errors."""

import math

import numpy as np
import pytest
import torch

from molflt.nn.diagnostics import rpe_bias_error
from molflt.nn.local_spectra import SmoothLocalSpectrum
from molflt.nn.quadrature import SphericalQuadratureFrequencies, half_sphere_rule
from molflt.nn.rpe import FourierRPE
from molflt.nn.spectra import GaussianBasisSpectrum, GaussianMixtureSpectrum


@pytest.mark.parametrize(("dim", "degree"), [(1, 9), (2, 8), (2, 9), (3, 3), (3, 11), (3, 13), (3, 29)])
def test_directional_rule_is_exact_for_even_polynomials_up_to_its_degree(dim: int, degree: int) -> None:
    """The mean of (u.e)^n over the unit sphere is prod (2 i - 1)/(X + 2 i - 2), i = 1 ... n/2."""
    directions, weights = half_sphere_rule(degree, dim)
    probes = np.random.default_rng(0).normal(size=(11, dim))
    probes /= np.linalg.norm(probes, axis=-1, keepdims=True)
    for power in range(0, degree + 1, 2):
        exact = math.prod((2 * i - 1) / (dim + 2 * i - 2) for i in range(1, power // 2 + 1))
        np.testing.assert_allclose((probes @ directions.T) ** power @ weights, exact, atol=1e-12)


@pytest.mark.parametrize("dim", [2, 3])
def test_no_direction_comes_with_its_antipode(dim: int) -> None:
    directions, _ = half_sphere_rule(11, dim)
    assert len(directions) == {2: 6, 3: 25}[dim]
    distance = np.linalg.norm(directions[:, None] + directions[None], axis=-1)
    assert distance.min() > 0.1


PROMISED = [
    ((3.0, 5.0), 6.0, 310),
    ((3.0, 5.0), 10.0, 600),
    ((3.0, 5.0), 15.0, 1226),
    ((2.0, 5.0), 10.0, 1483),
    ((1.0, 5.0), 10.0, 5385),
]


@pytest.mark.parametrize(("width_range", "extent", "num_frequencies"), PROMISED)
def test_rotation_changes_the_bias_by_less_than_promised_at_the_promised_r(
    width_range: tuple[float, float], extent: float, num_frequencies: int
) -> None:
    torch.manual_seed(0)
    sampler = SphericalQuadratureFrequencies.for_widths(2, 3, width_range, extent)
    assert sampler.num_frequencies == num_frequencies
    spectrum = GaussianBasisSpectrum(2, 3, 2, width_range)
    with torch.no_grad():
        # The sharpest function alone, the hardest, and both.
        spectrum.amplitude.copy_(torch.tensor([[1.0, 0.0], [0.5, 0.5]]))
    rpe = FourierRPE(sampler, spectrum).double()
    pos = torch.randn(1, 11, 3, dtype=torch.float64)
    pos *= extent / torch.cdist(pos, pos).max()
    exact = rpe.closed_form_bias(pos)
    rotations = torch.linalg.qr(torch.randn(13, 3, 3, dtype=torch.float64)).Q
    turned = torch.stack([rpe.dense_bias(pos @ rotation) for rotation in rotations])
    assert (turned.amax(0) - turned.amin(0)).max() < 1e-4
    assert (turned - exact).abs().max() < 1e-4


@pytest.mark.parametrize(("dim", "num_frequencies"), [(1, 16), (2, 166)])
def test_lower_dimensions_are_served_too(dim: int, num_frequencies: int) -> None:
    torch.manual_seed(0)
    sampler = SphericalQuadratureFrequencies.for_widths(2, dim, (2.0, 5.0), 10.0)
    assert sampler.num_frequencies == num_frequencies
    rpe = FourierRPE(sampler, GaussianBasisSpectrum(2, dim, 3, (2.0, 5.0))).double()
    pos = torch.randn(1, 11, dim, dtype=torch.float64)
    pos *= 10.0 / torch.cdist(pos, pos).max()
    scale = rpe.spectrum.amplitude.abs().sum(-1).view(2, 1, 1)
    assert ((rpe.dense_bias(pos) - rpe.closed_form_bias(pos)).abs() / scale).max() < 1e-4


def test_too_few_directions_break_the_invariance() -> None:
    """Negative control: the same shells with directions of degree 5 turn with the structure."""
    full = SphericalQuadratureFrequencies.for_widths(1, 1, (2.0, 5.0), 10.0)
    radii = full.fixed_frequencies.flatten().tolist()
    sampler = SphericalQuadratureFrequencies(1, 3, radii, (full.fixed_weights / 2).tolist(), 5)
    rpe = FourierRPE(sampler, GaussianBasisSpectrum(1, 3, 2, (2.0, 5.0)))
    along, diagonal = torch.tensor([[[10.0, 0, 0]]]), torch.full((1, 1, 3), 10 / 3**0.5)
    origin = torch.zeros(1, 1, 3)
    assert (rpe.dense_bias(along, origin) - rpe.dense_bias(diagonal, origin)).abs().item() > 1e-2


def test_an_even_spectrum_that_is_not_isotropic_is_integrated_too() -> None:
    torch.manual_seed(0)
    sampler = SphericalQuadratureFrequencies.for_widths(2, 2, (0.3, 3.0), 5.0)
    rpe = FourierRPE(sampler, SmoothLocalSpectrum(2, 2, 4, 2, (0.8, 1.2))).double()
    with torch.no_grad():
        rpe.spectrum.raw_radius[..., 1].add_(0.5)
    pos = torch.rand(1, 7, 2, dtype=torch.float64) * 3
    assert rpe_bias_error(rpe, pos).max() < 2e-3


def test_a_spectrum_that_is_not_even_is_refused() -> None:
    sampler = SphericalQuadratureFrequencies(2, 3, [0.1], [0.1], 3)
    with pytest.raises(
        ValueError, match=r"needs a spectrum with g\(-xi\) = g\(xi\); GaussianMixtureSpectrum"
    ):
        FourierRPE(sampler, GaussianMixtureSpectrum(2, 3))


def test_heads_share_frequencies_in_features_and_basis() -> None:
    torch.manual_seed(0)
    sampler = SphericalQuadratureFrequencies.for_widths(3, 3, (3.0, 5.0), 6.0)
    rpe = FourierRPE(sampler, GaussianBasisSpectrum(3, 3, 5, (3.0, 5.0))).double()
    pos = torch.randn(2, 5, 3, dtype=torch.float64)
    query, key = rpe(pos)
    assert query.shape == key.shape == (2, 3, 5, 620)
    torch.testing.assert_close(query @ key.mT, rpe.dense_bias(pos), rtol=0, atol=1e-12)
    projection = torch.randn(3, 7, 620, dtype=torch.float64)
    query_projection, key_projection = rpe.fold(projection)
    basis = rpe.basis(pos)
    torch.testing.assert_close(basis @ query_projection.mT, query @ projection.mT, rtol=0, atol=1e-11)
    torch.testing.assert_close(basis @ key_projection.mT, key @ projection.mT, rtol=0, atol=1e-11)


def test_resample_and_reset_change_nothing() -> None:
    sampler = SphericalQuadratureFrequencies(1, 3, [0.1, 0.2], [0.1, 0.1], [3, 5])
    before = sampler.frequencies.clone()
    sampler.resample(torch.Generator().manual_seed(0))
    sampler.reset_parameters()
    torch.testing.assert_close(sampler.frequencies, before, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: SphericalQuadratureFrequencies(1, 4, [0.1], [0.1], 3), "position_dim must be 1, 2 or 3"),
        (
            lambda: SphericalQuadratureFrequencies(1, 3, [0.1], [0.1, 0.2], 3),
            "one entry per shell, got 1, 2 and 1",
        ),
        (lambda: SphericalQuadratureFrequencies(1, 3, [0.0], [0.1], 3), r"radii must be positive, got 0\.0"),
        (
            lambda: SphericalQuadratureFrequencies(1, 3, [0.1], [0.1], 200),
            "degree must be at most 131, got 200",
        ),
        (lambda: SphericalQuadratureFrequencies.for_widths(1, 3, (0.5, 0.5), 40.0), "extent is too large"),
        (
            lambda: SphericalQuadratureFrequencies.for_widths(1, 1, (0.1, 5.0), 400.0),
            "extent must be smaller",
        ),
        (lambda: SphericalQuadratureFrequencies.for_widths(1, 3, (2.0, 1.0), 4.0), "width_range must be"),
        (
            lambda: SphericalQuadratureFrequencies.for_widths(1, 4, (2.0, 3.0), 4.0),
            "position_dim must be 1, 2 or 3",
        ),
    ],
)
def test_bad_arguments_are_named(build, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()
