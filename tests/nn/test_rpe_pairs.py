"""For every pair of spectrum and sampler: unbiased, bounded variance, scaling with g, live gradients."""

from collections.abc import Callable
from functools import partial

import pytest
import torch

from molflt.nn.diagnostics import variance_bound
from molflt.nn.frequencies import (
    FrequencySampler,
    GaussianFrequencies,
    OrthogonalGaussianFrequencies,
    SobolGaussianFrequencies,
    resample_,
)
from molflt.nn.gaussian_components import GaussianComponents
from molflt.nn.kernel_spectra import ShiftInvariantKernelSpectrum
from molflt.nn.kernels import GaussianKernel, LaplacianKernel, MaternKernel
from molflt.nn.local_spectra import LocalBoxSpectrum, SmoothLocalSpectrum
from molflt.nn.matched_frequencies import MatchedKernelFrequencies, MatchedMixtureFrequencies
from molflt.nn.quadrature import SphericalQuadratureFrequencies
from molflt.nn.radial_spectra import RadialMLPSpectrum
from molflt.nn.rpe import FourierRPE
from molflt.nn.spectra import GaussianBasisSpectrum, GaussianMixtureSpectrum, Spectrum

SPECTRA: dict[str, Callable[[int, int], Spectrum]] = {
    "gaussian_basis": lambda heads, dim: GaussianBasisSpectrum(heads, dim, 5, (0.8, 2.5)),
    "gaussian_mixture": lambda heads, dim: GaussianMixtureSpectrum(heads, dim, 3, 0.12, 0.1),
    "asymmetric_mixture": lambda heads, dim: GaussianMixtureSpectrum(
        heads, dim, 3, 0.12, 0.1, asymmetric=True
    ),
    "gaussian_kernel": lambda heads, dim: ShiftInvariantKernelSpectrum(GaussianKernel(heads, dim, 1.2)),
    "laplacian_kernel": lambda heads, dim: ShiftInvariantKernelSpectrum(LaplacianKernel(heads, dim, 1.2)),
    "matern_12": lambda heads, dim: ShiftInvariantKernelSpectrum(MaternKernel(heads, dim, 1.2, 0.5)),
    "matern_32": lambda heads, dim: ShiftInvariantKernelSpectrum(MaternKernel(heads, dim, 1.2, 1.5)),
    "matern_52": lambda heads, dim: ShiftInvariantKernelSpectrum(MaternKernel(heads, dim, 1.2, 2.5)),
    "local_box": lambda heads, dim: LocalBoxSpectrum(heads, dim, 2, (0.2, 1.8)),
    "smooth_local_2": lambda heads, dim: SmoothLocalSpectrum(heads, dim, 2, 2, (0.6, 1.3)),
    "smooth_local_3": lambda heads, dim: SmoothLocalSpectrum(heads, dim, 3, 2, (0.6, 1.3)),
    "radial_mlp": lambda heads, dim: RadialMLPSpectrum(heads, dim, 0.15, 7, 48),
}


def wide_enough(spectrum: Spectrum) -> float:
    """A Gaussian std under which the part of f that no draw ever sees stays below the standard error.

    Spectra that fall off like a power of |xi| have an infinite variance under any Gaussian density; a box
    falls off so slowly that its estimate overshoots near the edges unless the density is very wide.
    """
    if isinstance(spectrum, LocalBoxSpectrum):
        return 2.0
    return 0.7 if isinstance(spectrum, ShiftInvariantKernelSpectrum | SmoothLocalSpectrum) else 0.25


def matched_mixture(spectrum: Spectrum, num_frequencies: int) -> FrequencySampler:
    own = torch.tensor([0.1, 0.5, 2.5]).expand(spectrum.num_heads, 3)
    components = (
        spectrum.components
        if isinstance(spectrum, GaussianBasisSpectrum | GaussianMixtureSpectrum)
        else GaussianComponents(own, spectrum.position_dim)
    )
    return MatchedMixtureFrequencies(components, num_frequencies)


def matched_kernel(spectrum: Spectrum, num_frequencies: int) -> FrequencySampler:
    kernel = (
        spectrum.kernel
        if isinstance(spectrum, ShiftInvariantKernelSpectrum)
        else MaternKernel(spectrum.num_heads, spectrum.position_dim, 0.5, 0.5)
    )
    return MatchedKernelFrequencies(kernel, num_frequencies)


def gaussian(
    spectrum: Spectrum, num_frequencies: int, kind: type[GaussianFrequencies], per_dimension: bool = False
) -> FrequencySampler:
    std = wide_enough(spectrum)
    size = (spectrum.num_heads, num_frequencies, spectrum.position_dim)
    spread = torch.linspace(0.9, 1.2, spectrum.position_dim).expand(spectrum.num_heads, -1)
    return kind(*size, std=std * spread if per_dimension else std)


SAMPLERS: dict[str, Callable[[Spectrum, int], FrequencySampler]] = {
    "gaussian": partial(gaussian, kind=GaussianFrequencies),
    "per_dimension": partial(gaussian, kind=GaussianFrequencies, per_dimension=True),
    "orthogonal": partial(gaussian, kind=OrthogonalGaussianFrequencies),
    "sobol": partial(gaussian, kind=SobolGaussianFrequencies),
    "matched_mixture": matched_mixture,
    "matched_kernel": matched_kernel,
}


def replicas(spectrum_name: str, sampler_name: str, dim: int, heads: int, num_frequencies: int) -> FourierRPE:
    """An RPE whose heads have equal parameters, whatever their number, but draws of their own."""

    def build(count: int) -> FourierRPE:
        torch.manual_seed(dim)
        spectrum = SPECTRA[spectrum_name](count, dim)
        return FourierRPE(SAMPLERS[sampler_name](spectrum, num_frequencies), spectrum).double()

    rpe, single = build(heads), build(1)
    with torch.no_grad():
        for parameter, value in zip(rpe.parameters(), single.parameters(), strict=True):
            parameter.copy_(value.expand_as(parameter))
    return rpe


def displacements(count: int, dim: int) -> torch.Tensor:
    """Displacements with 0.4 <= |x_j| <= 1.6: off the boxes' edges and off 0, where unseen tails add up."""
    generator = torch.Generator().manual_seed(count)
    x = 2.4 * torch.rand(1, count, dim, dtype=torch.float64, generator=generator) - 1.2
    return x + 0.4 * x.sign()


def draw(rpe: FourierRPE, redraws: int, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Estimates of f(x) from every head and redraw `[redraws * H, N]`, and f(x) `[N]`."""
    generator = torch.Generator().manual_seed(0)
    origin = torch.zeros_like(x[:, :1])
    estimates = []
    with torch.no_grad():
        for _ in range(redraws):
            resample_(rpe, generator)
            estimates.append(rpe.dense_bias(x, origin)[0, ..., 0])
        return torch.cat(estimates), rpe.closed_form_bias(x, origin)[0, 0, :, 0]


@pytest.mark.parametrize("dim", [1, 2, 3])
@pytest.mark.parametrize("sampler_name", SAMPLERS)
@pytest.mark.parametrize("spectrum_name", SPECTRA)
def test_mean_over_redraws_is_the_closed_form(spectrum_name: str, sampler_name: str, dim: int) -> None:
    """Theorem 4.1: within 4 standard errors of the mean over 1,000 estimates."""
    rpe = replicas(spectrum_name, sampler_name, dim, 250, 29)
    estimates, exact = draw(rpe, 4, displacements(5, dim))
    standard_error = estimates.std(0) / len(estimates) ** 0.5
    # 1e-6 for the closed form of the radial network, which is a quadrature itself.
    assert ((estimates.mean(0) - exact).abs() <= 4 * standard_error + 1e-6).all()


def test_a_density_normalised_in_fewer_dimensions_is_found_out() -> None:
    class OneDimensionalDensity(GaussianFrequencies):
        def log_sampling_density(self, frequencies: torch.Tensor) -> torch.Tensor:
            return super().log_sampling_density(frequencies) / self.position_dim

    spectrum = SPECTRA["gaussian_basis"](250, 3)
    with torch.no_grad():
        spectrum.amplitude.fill_(0.2)
    rpe = FourierRPE(OneDimensionalDensity(250, 29, 3, 0.25), spectrum).double()
    estimates, exact = draw(rpe, 4, displacements(5, 3))
    standard_error = estimates.std(0) / len(estimates) ** 0.5
    assert ((estimates.mean(0) - exact).abs() > 10 * standard_error).any()


BOUNDED = [
    ("gaussian_basis", "gaussian"),
    ("gaussian_basis", "per_dimension"),
    ("gaussian_basis", "matched_mixture"),
    ("gaussian_basis", "matched_kernel"),
    ("gaussian_mixture", "gaussian"),
    ("gaussian_mixture", "matched_mixture"),
    ("asymmetric_mixture", "gaussian"),
    ("asymmetric_mixture", "matched_mixture"),
    ("gaussian_kernel", "gaussian"),
    ("gaussian_kernel", "matched_kernel"),
    ("laplacian_kernel", "matched_kernel"),
    ("matern_12", "matched_kernel"),
    ("matern_32", "matched_kernel"),
    ("matern_52", "matched_kernel"),
    ("radial_mlp", "gaussian"),
    ("radial_mlp", "matched_mixture"),
]


@pytest.mark.parametrize("dim", [1, 2, 3])
@pytest.mark.parametrize(("spectrum_name", "sampler_name"), BOUNDED)
def test_variance_is_below_its_bound(spectrum_name: str, sampler_name: str, dim: int) -> None:
    """Theorem A.3: Var <= (c^2 - f^2)/R, with c from the diagnostics; finite for these pairs."""
    rpe = replicas(spectrum_name, sampler_name, dim, 250, 29)
    bound = variance_bound(replicas(spectrum_name, sampler_name, dim, 1, 29))
    estimates, exact = draw(rpe, 4, displacements(5, dim))
    assert bound.isfinite().all()
    assert (estimates.var(0) < (bound.square() - exact.square()) / 29).all()
    assert (estimates.var(0) > 0).all()


@pytest.mark.parametrize("sampler_name", ["gaussian", "matched_mixture"])
def test_largest_error_falls_with_the_square_root_of_r(sampler_name: str) -> None:
    """Theorem 4.2: the slope of log max error against log R over a sweep of R = 16 ... 4,096."""
    counts = [16, 64, 256, 1024, 4096]
    errors = []
    for count in counts:
        rpe = replicas("gaussian_basis", sampler_name, 2, 40, count)
        estimates, exact = draw(rpe, 2, displacements(31, 2))
        errors.append((estimates - exact).abs().amax(-1).mean())
    log_count, log_error = torch.tensor(counts).double().log(), torch.stack(errors).log()
    centred = log_count - log_count.mean()
    slope = (centred * log_error).sum() / centred.square().sum()
    # 80 estimates of the maximum with a spread of about a third: 0.04 each, over a lever arm of 4.4.
    assert abs(slope + 0.5) < 0.04


class Scaled(Spectrum):
    """A spectrum times a number."""

    def __init__(self, spectrum: Spectrum, factor: float) -> None:
        super().__init__(spectrum.num_heads, spectrum.position_dim)
        self.spectrum = spectrum
        self.factor = factor

    def forward(self, frequencies: torch.Tensor) -> torch.Tensor:
        return self.factor * self.spectrum(frequencies)


@pytest.mark.parametrize("factor", [2.0, -1.0, -0.3])
@pytest.mark.parametrize("spectrum_name", SPECTRA)
def test_scaling_the_spectrum_scales_the_bias_sign_included(spectrum_name: str, factor: float) -> None:
    rpe = replicas(spectrum_name, "gaussian", 3, 2, 11)
    scaled = FourierRPE(rpe.sampler, Scaled(rpe.spectrum, factor))
    pos = displacements(7, 3)
    query, key = scaled(pos)
    torch.testing.assert_close(query @ key.mT, factor * rpe.dense_bias(pos), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(scaled.dense_bias(pos), factor * rpe.dense_bias(pos), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("spectrum_name", SPECTRA)
def test_a_spectrum_declared_even_is_even_and_others_are_not(spectrum_name: str) -> None:
    torch.manual_seed(0)
    spectrum = SPECTRA[spectrum_name](2, 3).double()
    frequencies = 0.2 * torch.randn(2, 7, 3, dtype=torch.float64)
    difference = (spectrum(frequencies) - spectrum(-frequencies)).abs().max()
    assert (difference < 1e-12) == spectrum.even


@pytest.mark.parametrize("sampler_name", SAMPLERS)
@pytest.mark.parametrize("spectrum_name", SPECTRA)
def test_every_parameter_has_a_gradient_from_the_start(spectrum_name: str, sampler_name: str) -> None:
    torch.manual_seed(0)
    spectrum = SPECTRA[spectrum_name](3, 3)
    rpe = FourierRPE(SAMPLERS[sampler_name](spectrum, 17), spectrum)
    query, key = rpe(displacements(7, 3).float())
    ((query @ key.mT) * torch.randn(7, 7)).sum().backward()
    for name, parameter in rpe.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert (parameter.grad != 0).all(), name


@pytest.mark.parametrize("spectrum_name", ["gaussian_basis", "gaussian_kernel", "radial_mlp"])
def test_every_isotropic_spectrum_has_a_gradient_under_quadrature(spectrum_name: str) -> None:
    torch.manual_seed(0)
    rpe = FourierRPE(
        SphericalQuadratureFrequencies.for_widths(3, 3, (0.8, 2.5), 3.0, 1e-3), SPECTRA[spectrum_name](3, 3)
    )
    query, key = rpe(displacements(7, 3).float())
    ((query @ key.mT) * torch.randn(7, 7)).sum().backward()
    for name, parameter in rpe.named_parameters():
        assert parameter.grad is not None, name
        assert (parameter.grad != 0).all(), name


@pytest.mark.parametrize("spectrum_name", SPECTRA)
def test_extreme_inputs_give_finite_values_and_gradients(spectrum_name: str) -> None:
    """Coincident atoms, positions of 1e4, a sampling std of 1e-4, in float32; closed form included."""
    torch.manual_seed(0)
    spectrum = SPECTRA[spectrum_name](3, 3)
    rpe = FourierRPE(GaussianFrequencies(3, 17, 3, std=torch.tensor([1e-4, 0.25, 1.0])), spectrum)
    pos = torch.randn(2, 5, 3)
    pos[:, 1] = pos[:, 0]
    pos[1] *= 1e4
    pos.requires_grad_()
    query, key = rpe(pos)
    outputs = [query @ key.mT, rpe.dense_bias(pos), rpe.closed_form_bias(pos)]
    sum(output.sum() for output in outputs).backward()
    assert all(output.isfinite().all() for output in outputs)
    assert pos.grad is not None
    assert pos.grad.isfinite().all()
    assert all(parameter.grad.isfinite().all() for parameter in rpe.parameters())
