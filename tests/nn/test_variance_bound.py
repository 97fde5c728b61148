"""The supremum of |g|/p: exact values, unbounded ratios found and reported once, bounded ones passed."""

import math
import warnings

import pytest
import torch

from molflt.nn.diagnostics import (
    UnboundedRatioWarning,
    variance_bound,
)
from molflt.nn.frequencies import GaussianFrequencies
from molflt.nn.gaussian_components import GaussianComponents
from molflt.nn.kernel_spectra import ShiftInvariantKernelSpectrum
from molflt.nn.kernels import GaussianKernel, LaplacianKernel, MaternKernel
from molflt.nn.local_spectra import LocalBoxSpectrum, SmoothLocalSpectrum
from molflt.nn.matched_frequencies import MatchedKernelFrequencies, MatchedMixtureFrequencies
from molflt.nn.quadrature import SphericalQuadratureFrequencies
from molflt.nn.radial_spectra import RadialMLPSpectrum
from molflt.nn.rpe import FourierRPE, default_rpe
from molflt.nn.spectra import GaussianBasisSpectrum, GaussianMixtureSpectrum


@pytest.mark.parametrize("dim", [1, 2, 3])
def test_bound_of_a_gaussian_under_a_wider_one_is_the_ratio_of_volumes(dim: int) -> None:
    """c = (std_p / std_g)^X |amplitude|, at the origin."""
    spectrum = ShiftInvariantKernelSpectrum(GaussianKernel(2, dim, torch.tensor([1.0, 2.0])))
    with torch.no_grad():
        spectrum.amplitude.copy_(torch.tensor([0.5, -2.0]))
    bound = variance_bound(FourierRPE(GaussianFrequencies(2, 5, dim, 0.3), spectrum))
    ratio = 0.3 * 2 * math.pi * torch.tensor([1.0, 2.0], dtype=torch.float64)
    torch.testing.assert_close(bound, ratio**dim * torch.tensor([0.5, 2.0]), rtol=1e-4, atol=0)


def test_bound_is_the_amplitude_where_the_density_is_the_kernels() -> None:
    for kernel in (GaussianKernel(2, 3, 1.7), LaplacianKernel(2, 3, 1.7), MaternKernel(2, 3, 1.7, 0.5)):
        rpe = FourierRPE(MatchedKernelFrequencies(kernel, 5), ShiftInvariantKernelSpectrum(kernel))
        torch.testing.assert_close(variance_bound(rpe), torch.ones(2, dtype=torch.float64), rtol=1e-6, atol=0)


@pytest.mark.parametrize("matched", [False, True])
@pytest.mark.parametrize("asymmetric", [False, True])
def test_bound_of_a_mixture_equals_a_search_on_a_fine_grid(matched: bool, asymmetric: bool) -> None:
    torch.manual_seed(1)
    spectrum = GaussianMixtureSpectrum(2, 2, 5, 0.05, 0.2, asymmetric=asymmetric)
    sampler = (
        MatchedMixtureFrequencies(spectrum.components, 64) if matched else GaussianFrequencies(2, 64, 2, 0.3)
    )
    rpe = FourierRPE(sampler, spectrum)
    bound = variance_bound(rpe)
    axis = torch.linspace(-1.2, 1.2, 501, dtype=torch.float64)
    grid = torch.cartesian_prod(axis, axis)[None]
    with torch.no_grad():
        rpe.double()
        on_grid = (spectrum(grid).abs() / sampler.sampling_density(grid)).amax(-1)
    # The grid reaches far enough for a maximum inside it, but the matched ratio may keep rising outside.
    assert (bound > 0.98 * on_grid).all()
    if matched:
        weight = spectrum.amplitude.abs()
        if spectrum.sine_amplitude is not None:
            weight = torch.complex(spectrum.amplitude, spectrum.sine_amplitude).abs()
        assert (bound <= 5 * weight.amax(-1) * (1 + 1e-6)).all()
    else:
        torch.testing.assert_close(bound, on_grid, rtol=0.02, atol=0)


UNBOUNDED = {
    "too_narrow": lambda: (
        GaussianFrequencies(2, 5, 3, 0.99 / (2 * math.pi)),
        GaussianBasisSpectrum(2, 3, 3, (1.0, 2.0)),
    ),
    "one_narrow_dimension": lambda: (
        GaussianFrequencies(2, 5, 3, torch.tensor([0.3, 0.15, 0.3]).expand(2, 3)),
        GaussianBasisSpectrum(2, 3, 3, (1.0, 2.0)),
    ),
    "box": lambda: (GaussianFrequencies(2, 5, 2, 1.0), LocalBoxSpectrum(2, 2)),
    "box_under_cauchy": lambda: (MatchedKernelFrequencies(LaplacianKernel(2, 2), 5), LocalBoxSpectrum(2, 2)),
    "smooth_local": lambda: (GaussianFrequencies(2, 5, 2, 1.0), SmoothLocalSpectrum(2, 2, 4)),
    "laplacian": lambda: (
        GaussianFrequencies(2, 5, 3, 1.0),
        ShiftInvariantKernelSpectrum(LaplacianKernel(2, 3)),
    ),
    "matern": lambda: (GaussianFrequencies(2, 5, 1, 1.0), ShiftInvariantKernelSpectrum(MaternKernel(2, 1))),
    "radial_mlp": lambda: (GaussianFrequencies(2, 5, 3, 0.29), RadialMLPSpectrum(2, 3, 0.3)),
    "mixture_off_centre": lambda: (
        GaussianFrequencies(2, 5, 2, 0.05),
        GaussianMixtureSpectrum(2, 2, 3, 0.05, 0.2),
    ),
    "kernel_too_smooth": lambda: (
        MatchedKernelFrequencies(MaternKernel(2, 2, 1.0, 2.5), 5),
        ShiftInvariantKernelSpectrum(MaternKernel(2, 2, 1.0, 0.5)),
    ),
}


@pytest.mark.parametrize("name", UNBOUNDED)
def test_thin_tails_of_the_density_are_reported_once(name: str) -> None:
    torch.manual_seed(0)
    rpe = FourierRPE(*UNBOUNDED[name]())
    with pytest.warns(UnboundedRatioWarning, match=r"g/p is unbounded in heads \[0, 1\].*Take a wider"):
        bound = variance_bound(rpe)
    assert bound.isinf().all()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert variance_bound(rpe).isinf().all()


@pytest.mark.parametrize(
    ("sampler", "spectrum"),
    [
        (GaussianFrequencies(2, 5, 3, 1 / (2 * math.pi)), GaussianBasisSpectrum(2, 3, 3, (1.0, 2.0))),
        (MatchedKernelFrequencies(LaplacianKernel(2, 2, 0.2), 5), SmoothLocalSpectrum(2, 2, 2)),
        (
            MatchedKernelFrequencies(MaternKernel(2, 2, 1.0, 0.5), 5),
            ShiftInvariantKernelSpectrum(MaternKernel(2, 2)),
        ),
        (GaussianFrequencies(2, 5, 3, 0.3), RadialMLPSpectrum(2, 3, 0.3)),
    ],
    ids=["equal_std", "smooth_local_under_cauchy", "rougher_kernel", "radial_mlp_equal_std"],
)
def test_tails_that_are_thick_enough_pass_without_a_warning(sampler, spectrum) -> None:
    assert variance_bound(FourierRPE(sampler, spectrum)).isfinite().all()


def test_default_rpe_is_bounded_at_the_start() -> None:
    for dim in (1, 2, 3):
        assert variance_bound(default_rpe(5, dim)).isfinite().all()


def test_only_the_unbounded_heads_are_named() -> None:
    std = torch.tensor([[0.1], [0.3], [0.1]])
    spectrum = GaussianBasisSpectrum(3, 3, 1, (1.0, 1.0))
    sampler = GaussianFrequencies(3, 5, 3, std.flatten())
    with pytest.warns(UnboundedRatioWarning, match=r"heads \[0, 2\]"):
        bound = variance_bound(FourierRPE(sampler, spectrum))
    assert bound.isinf().tolist() == [True, False, True]


def test_a_bound_that_is_finite_but_useless_is_reported() -> None:
    spectrum = GaussianMixtureSpectrum(3, 3, num_basis=1, std=0.05, mean_std=0.0)
    with torch.no_grad():
        spectrum.components.mean.fill_(0.9)
    rpe = FourierRPE(GaussianFrequencies(3, 5, 3, std=0.2), spectrum)
    with pytest.warns(UnboundedRatioWarning, match=r"heads \[0, 1, 2\], or as good as \(up to \de\+"):
        assert variance_bound(rpe).isfinite().all()


def test_the_rpe_is_left_as_it_was() -> None:
    rpe = default_rpe(2, 3)
    variance_bound(rpe)
    assert all(parameter.dtype == torch.float32 and parameter.grad is None for parameter in rpe.parameters())


def test_quadrature_has_no_variance_bound_and_says_so() -> None:
    sampler = SphericalQuadratureFrequencies(2, 3, [0.1], [0.1], 3)
    with pytest.raises(NotImplementedError, match="has no sampling density"):
        variance_bound(FourierRPE(sampler, GaussianBasisSpectrum(2, 3)))


def test_a_mixture_density_bounds_any_amplitudes() -> None:
    torch.manual_seed(0)
    spectrum = GaussianBasisSpectrum(3, 3, 7)
    components = GaussianComponents(spectrum.components.std.detach(), 3)
    bound = variance_bound(FourierRPE(MatchedMixtureFrequencies(components, 7), spectrum))
    assert (bound <= 7 * spectrum.amplitude.abs().amax(-1) * (1 + 1e-6)).all()


@pytest.mark.parametrize("asymmetric", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_a_matched_ratio_that_still_rises_at_the_outer_ends_is_bounded(seed: int, asymmetric: bool) -> None:
    """Means much closer than the std: the ratio nears its limit only where |g| is hardly a number."""
    torch.manual_seed(seed)
    spectrum = GaussianMixtureSpectrum(4, 2, 3, mean_std=0.002, asymmetric=asymmetric)
    bound = variance_bound(FourierRPE(MatchedMixtureFrequencies(spectrum.components, 16), spectrum))
    weight = spectrum.amplitude.abs()
    if spectrum.sine_amplitude is not None:
        weight = torch.complex(spectrum.amplitude, spectrum.sine_amplitude).abs()
    limit = 3 * weight.amax(-1).double()
    assert (bound <= limit * (1 + 1e-6)).all()
    assert torch.isclose(bound, limit, rtol=1e-6).any()


def test_a_ratio_that_rises_without_limit_is_found_though_the_density_is_a_mixture() -> None:
    torch.manual_seed(0)
    spectrum = GaussianMixtureSpectrum(2, 2, 3)
    narrower = GaussianComponents(
        0.9 * spectrum.components.std.detach(), 2, spectrum.components.mean.detach()
    )
    with pytest.warns(UnboundedRatioWarning, match=r"heads \[0, 1\]"):
        assert variance_bound(FourierRPE(MatchedMixtureFrequencies(narrower, 16), spectrum)).isinf().all()
