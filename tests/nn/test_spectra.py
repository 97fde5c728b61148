"""Sums of Gaussians: closed form against quadrature, what amplitudes mean, asymmetry, errors."""

import math

import pytest
import torch
from torch.nn.utils import prune

from molflt.nn.frequencies import (
    GaussianFrequencies,
    OrthogonalGaussianFrequencies,
    SobolGaussianFrequencies,
)
from molflt.nn.gaussian_components import GaussianComponents
from molflt.nn.spectra import GaussianBasisSpectrum, GaussianMixtureSpectrum, Spectrum


class TwiceTheDensity(GaussianFrequencies):
    def log_sampling_density(self, frequencies: torch.Tensor) -> torch.Tensor:
        return super().log_sampling_density(frequencies) + math.log(2)


def inverse_transform(spectrum: Spectrum, x: torch.Tensor, largest: float, points: int) -> torch.Tensor:
    """Re int g(xi) exp(2 pi i x.xi) dxi on a grid, `[N, H]`."""
    axis = torch.linspace(-largest, largest, points, dtype=torch.float64)
    grid = torch.cartesian_prod(*[axis] * spectrum.position_dim).view(1, -1, spectrum.position_dim)
    g = spectrum(grid).to(torch.complex128) * (axis[1] - axis[0]) ** spectrum.position_dim
    wave = torch.polar(torch.ones((), dtype=torch.float64), 2 * math.pi * x @ grid[0].T)
    return (wave @ g.T).real


@pytest.mark.parametrize(("dim", "points"), [(1, 801), (2, 201), (3, 61)])
@pytest.mark.parametrize("kind", ["basis", "mixture", "asymmetric"])
def test_closed_form_is_the_inverse_transform_of_the_spectrum(kind: str, dim: int, points: int) -> None:
    torch.manual_seed(dim)
    spectrum = {
        "basis": lambda: GaussianBasisSpectrum(2, dim, 3, (0.9, 1.7)),
        "mixture": lambda: GaussianMixtureSpectrum(2, dim, 3, 0.12, 0.1),
        "asymmetric": lambda: GaussianMixtureSpectrum(2, dim, 3, 0.12, 0.1, asymmetric=True),
    }[kind]().double()
    x = torch.linspace(-1.5, 2.0, 5 * dim, dtype=torch.float64).view(5, dim)
    expected = inverse_transform(spectrum, x, 1.2, points)
    torch.testing.assert_close(spectrum.closed_form(x), expected, rtol=0, atol=1e-7)


@pytest.mark.parametrize("sampler", ["gaussian", "orthogonal", "sobol", "per dimension", "a subclass"])
@pytest.mark.parametrize("dim", [1, 3])
def test_importance_weights_are_the_spectrum_over_the_density(sampler: str, dim: int) -> None:
    """Values, and derivatives in every parameter of the spectrum and the sampler."""
    torch.manual_seed(dim)
    std = torch.tensor([0.2, 0.5])
    draws = {
        "gaussian": lambda: GaussianFrequencies(2, 5, dim, std),
        "orthogonal": lambda: OrthogonalGaussianFrequencies(2, 5, dim, std),
        "sobol": lambda: SobolGaussianFrequencies(2, 5, dim, std),
        "per dimension": lambda: GaussianFrequencies(2, 5, dim, std, per_dimension=True),
        "a subclass": lambda: TwiceTheDensity(2, 5, dim, std),
    }[sampler]().double()
    spectrum = GaussianBasisSpectrum(2, dim, 7).double()
    parameters = [*spectrum.parameters(), *draws.parameters()]
    frequencies = draws.frequencies
    expected = spectrum(frequencies) / (5 * draws.sampling_density(frequencies))
    weights = spectrum.importance_weights(draws)
    torch.testing.assert_close(weights, expected, rtol=1e-12, atol=0)
    cotangent = torch.randn_like(weights)
    torch.testing.assert_close(
        torch.autograd.grad(weights, parameters, cotangent),
        torch.autograd.grad(expected, parameters, cotangent),
        rtol=1e-10,
        atol=1e-12,
    )


def test_importance_weights_heed_subclasses_hooks_and_other_components() -> None:
    class Doubled(GaussianBasisSpectrum):
        def forward(self, frequencies: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(frequencies)

    class Tripled(GaussianComponents):
        def forward(self, frequencies: torch.Tensor) -> torch.Tensor:
            return 3 * super().forward(frequencies)

    torch.manual_seed(0)
    std = torch.full((2, 32), 0.2)
    draws = GaussianFrequencies(2, 5, 3)
    tripled, shifted = GaussianBasisSpectrum(2, 3), GaussianBasisSpectrum(2, 3)
    tripled.components = Tripled(std, 3)
    shifted.components = GaussianComponents(std, 3, mean=torch.randn(2, 32, 3))
    pruned = prune.random_unstructured(GaussianBasisSpectrum(2, 3), "amplitude", 0.5)
    for spectrum in (Doubled(2, 3), tripled, shifted, pruned):
        frequencies, quadrature_weights = draws()
        expected = spectrum(frequencies) * quadrature_weights
        torch.testing.assert_close(spectrum.importance_weights(draws), expected)
    seen: list[str] = []
    plain = GaussianBasisSpectrum(2, 3)
    for name, module in (("sampler", draws), ("components", plain.components), ("spectrum", plain)):
        module.register_forward_hook(lambda *_, name=name: seen.append(name))
    plain.importance_weights(draws)
    assert seen == ["sampler", "components", "spectrum"]
    # A parameter that a hook makes anew for each call is trained more than once.
    for _ in range(2):
        pruned.importance_weights(draws).sum().backward()


def test_importance_weights_are_finite_where_densities_are_not() -> None:
    spectrum, draws = GaussianBasisSpectrum(2, 3), GaussianFrequencies(2, 5, 3, std=1e-14)
    assert draws.sampling_density(draws.frequencies).isinf().any()
    weights = spectrum.importance_weights(draws)
    assert weights.isfinite().all()
    # A vanishing std draws all frequencies at the origin, and g/p is next to nothing there.
    assert weights.abs().max() < 1e-30


@pytest.mark.parametrize("dim", [1, 3])
def test_amplitude_is_what_a_basis_function_adds_at_zero_displacement(dim: int) -> None:
    spectrum = GaussianBasisSpectrum(2, dim, 7)
    at_zero = spectrum.closed_form(torch.zeros(dim))
    torch.testing.assert_close(at_zero, spectrum.amplitude.sum(-1))


def test_amplitudes_start_so_that_f_at_zero_has_unit_variance() -> None:
    torch.manual_seed(0)
    at_zero = GaussianBasisSpectrum(4001, 3, 11).closed_form(torch.zeros(3))
    # 4 standard errors of a variance from 4,001 normal numbers.
    assert abs(at_zero.var().item() - 1) < 4 * (2 / 4001) ** 0.5


def test_gaussian_basis_equals_the_usual_parametrisation() -> None:
    """w_t = amplitude_t (sqrt(2 pi) s_t)^X in g = sum_t w_t exp(-2 pi^2 s_t^2 |xi|^2)."""
    spectrum = GaussianBasisSpectrum(2, 3, 5).double()
    frequencies = 0.3 * torch.randn(2, 7, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    weight = spectrum.amplitude * (math.sqrt(2 * math.pi) * spectrum.widths) ** 3
    exponent = (
        -2 * math.pi**2 * spectrum.widths.square()[:, None] * frequencies.square().sum(-1, keepdim=True)
    )
    expected = (weight[:, None] * exponent.exp()).sum(-1)
    torch.testing.assert_close(spectrum(frequencies), expected, rtol=1e-10, atol=1e-12)


def test_widths_start_log_spaced_over_their_range() -> None:
    widths = GaussianBasisSpectrum(2, 3, 3, (0.5, 8.0)).widths
    torch.testing.assert_close(widths, torch.tensor([[0.5, 2.0, 8.0]]).expand(2, 3))


def test_only_the_sine_part_tells_directions_apart() -> None:
    torch.manual_seed(0)
    x = torch.randn(7, 2, dtype=torch.float64)
    even = GaussianMixtureSpectrum(3, 2, 5).double()
    torch.testing.assert_close(even.closed_form(x), even.closed_form(-x), rtol=1e-12, atol=0)
    odd = GaussianMixtureSpectrum(3, 2, 5, asymmetric=True).double()
    with torch.no_grad():
        odd.amplitude.zero_()
    torch.testing.assert_close(odd.closed_form(x), -odd.closed_form(-x), rtol=1e-12, atol=0)
    assert odd.closed_form(x).abs().min() > 1e-4


def test_mixture_has_two_plus_x_parameters_per_component_and_head() -> None:
    count = sum(parameter.numel() for parameter in GaussianMixtureSpectrum(3, 2, 5).parameters())
    assert count == (2 + 2) * 5 * 3


def test_reset_restores_widths_and_draws_new_amplitudes() -> None:
    spectrum = GaussianBasisSpectrum(2, 3, 5)
    widths, amplitude = spectrum.widths.detach().clone(), spectrum.amplitude.detach().clone()
    with torch.no_grad():
        spectrum.components.raw_std.add_(1.0)
    spectrum.reset_parameters()
    torch.testing.assert_close(spectrum.widths, widths)
    assert not torch.equal(spectrum.amplitude, amplitude)


def test_a_spectrum_without_closed_form_says_what_to_do() -> None:
    with pytest.raises(NotImplementedError, match=r"no closed form: use FourierRPE\.dense_bias"):
        Spectrum(1, 3).closed_form(torch.zeros(3))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: GaussianBasisSpectrum(2, 3, 5, (0.0, 1.0)), r"width_range must be .* got \(0\.0, 1\.0\)"),
        (lambda: GaussianBasisSpectrum(2, 3, 5, (2.0, 1.0)), r"width_range must be .* got \(2\.0, 1\.0\)"),
        (lambda: GaussianBasisSpectrum(2, 3, 0), "number of values in width_range must be at least 1, got 0"),
        (lambda: GaussianBasisSpectrum(0, 3), "num_heads and position_dim must be at least 1, got 0 and 3"),
        (lambda: GaussianMixtureSpectrum(2, 3, std=-1.0), r"std must be positive .* got -1\.0 and 0\.1"),
        (lambda: GaussianMixtureSpectrum(2, 3, num_basis=0), "num_basis must be at least 1, got 0"),
    ],
)
def test_bad_arguments_are_named(build, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()
