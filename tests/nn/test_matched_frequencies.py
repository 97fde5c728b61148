"""Matched samplers: strata, density, sharing with the spectrum, and the gain they are for."""

import math

import pytest
import torch

from molflt.nn.frequencies import FrequencySampler, GaussianFrequencies
from molflt.nn.gaussian_components import GaussianComponents
from molflt.nn.kernel_spectra import ShiftInvariantKernelSpectrum
from molflt.nn.kernels import MaternKernel
from molflt.nn.matched_frequencies import (
    MatchedKernelFrequencies,
    MatchedMixtureFrequencies,
    stratified_components,
)
from molflt.nn.rpe import FourierRPE
from molflt.nn.spectra import GaussianBasisSpectrum, GaussianMixtureSpectrum


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_every_component_gets_its_exact_share_where_t_divides_r() -> None:
    index = stratified_components(3, 35, 7, seeded(0))
    assert torch.equal(index, (torch.arange(35) // 5).expand(3, -1))


@pytest.mark.parametrize(("num_frequencies", "num_components"), [(5, 13), (13, 5)])
def test_every_component_has_the_same_expected_share_otherwise(
    num_frequencies: int, num_components: int
) -> None:
    index = stratified_components(20011, num_frequencies, num_components, seeded(1))
    share = torch.bincount(index.flatten(), minlength=num_components) / 20011
    expected = num_frequencies / num_components
    # The number of hits of a component per head has a variance of at most 1/4 + 1/4 (two shared strata).
    assert (share - expected).abs().max() < 4 * (0.5 / 20011) ** 0.5


def test_density_is_the_mean_of_the_components() -> None:
    std, mean = torch.tensor([[0.2, 0.5]]), torch.tensor([[[0.1, 0.3], [-0.4, 0.0]]])
    sampler = MatchedMixtureFrequencies(GaussianComponents(std, 2, mean), 6, seeded(2)).double()
    frequencies, weights = sampler()
    normals = [
        torch.distributions.MultivariateNormal(m.double(), s.double() ** 2 * torch.eye(2).double())
        for m, s in zip(mean[0], std[0], strict=True)
    ]
    density = sum(normal.log_prob(frequencies).exp() for normal in normals) / 2
    torch.testing.assert_close(1 / (6 * weights), density, rtol=1e-5, atol=0)


def test_frequencies_are_drawn_around_the_mean_of_their_component() -> None:
    std, mean = torch.full((1, 2), 1e-6), torch.tensor([[[0.1, 0.3], [-0.4, 0.0]]])
    sampler = MatchedMixtureFrequencies(GaussianComponents(std, 2, mean), 6, seeded(3))
    torch.testing.assert_close(sampler.frequencies, mean.repeat_interleave(3, dim=1), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "spectrum",
    [GaussianBasisSpectrum(2, 3, 5), GaussianMixtureSpectrum(2, 3, 5)],
    ids=["gaussian_basis", "gaussian_mixture"],
)
def test_components_are_shared_with_the_spectrum_and_learned_through_both(
    spectrum: GaussianBasisSpectrum | GaussianMixtureSpectrum,
) -> None:
    sampler = MatchedMixtureFrequencies(spectrum.components, 7, seeded(4))
    rpe = FourierRPE(sampler, spectrum)
    names = [name for name, _ in rpe.named_parameters()]
    assert len(names) == len({name.split(".")[-1] for name in names})
    frequencies = sampler.frequencies
    with torch.no_grad():
        spectrum.components.raw_std.sub_(1.0)
    assert not torch.equal(sampler.frequencies, frequencies)
    sampler.frequencies.square().sum().backward()
    assert spectrum.components.raw_std.grad is not None
    assert (spectrum.components.raw_std.grad != 0).all()


def test_a_saved_matched_rpe_loads_with_components_still_shared() -> None:
    def build(seed: int) -> FourierRPE:
        torch.manual_seed(seed)
        spectrum = GaussianBasisSpectrum(2, 3, 5)
        return FourierRPE(MatchedMixtureFrequencies(spectrum.components, 7), spectrum)

    saved, loaded = build(0), build(1)
    with torch.no_grad():
        saved.spectrum.components.raw_std.add_(0.3)
    loaded.load_state_dict(saved.state_dict())
    assert loaded.sampler.components is loaded.spectrum.components
    pos = torch.randn(1, 5, 3)
    torch.testing.assert_close(loaded.dense_bias(pos), saved.dense_bias(pos), rtol=0, atol=0)


def test_matched_kernel_makes_the_ratio_constant() -> None:
    spectrum = ShiftInvariantKernelSpectrum(MaternKernel(2, 3, 1.7, smoothness=0.5))
    with torch.no_grad():
        spectrum.amplitude.copy_(torch.tensor([1.5, -0.5]))
    rpe = FourierRPE(MatchedKernelFrequencies(spectrum.kernel, 11, seeded(5)), spectrum).double()
    expected = torch.tensor([[1.5 / 11], [-0.5 / 11]], dtype=torch.float64).expand(-1, 11)
    torch.testing.assert_close(rpe.importance_weights(), expected, rtol=1e-12, atol=0)


def test_resample_comes_from_the_generator() -> None:
    samplers: list[FrequencySampler] = [
        MatchedMixtureFrequencies(GaussianBasisSpectrum(2, 3, 5).components, 7, seeded(6)),
        MatchedKernelFrequencies(MaternKernel(2, 3), 7, seeded(6)),
    ]
    for sampler in samplers:
        first = sampler.frequencies.clone()
        sampler.resample(seeded(7))
        assert not torch.equal(sampler.frequencies, first)
        sampler.resample(seeded(6))
        torch.testing.assert_close(sampler.frequencies, first, rtol=0, atol=0)


@pytest.mark.parametrize(("num_frequencies", "num_draws"), [(64, 1024), (1024, 96)])
def test_matched_mixture_beats_any_single_gaussian(num_frequencies: int, num_draws: int) -> None:
    """RMS error over draws: 2.5 times below a Gaussian of finite c, 1.5 times below the best std.

    X = 3, 16 widths from 0.5 to 5 Å with equal amplitudes, positions uniform in a 20 Å box.
    """
    num_heads = 32
    spectrum = GaussianBasisSpectrum(num_heads, 3, 16, (0.5, 5.0))
    with torch.no_grad():
        spectrum.amplitude.fill_(1 / 16)
    pos = 20 * torch.rand(1, 12, 3, generator=seeded(8))

    def rms_error(sampler: FrequencySampler) -> float:
        rpe, generator, squares = FourierRPE(sampler, spectrum), seeded(9), []
        exact = rpe.closed_form_bias(pos)
        with torch.no_grad():
            for _ in range(num_draws // num_heads):
                rpe.sampler.resample(generator)
                squares.append((rpe.dense_bias(pos) - exact).square().mean().item())
        return math.sqrt(sum(squares) / len(squares))

    mixture = rms_error(MatchedMixtureFrequencies(spectrum.components, num_frequencies))
    widths = (0.5, 0.6, 0.8, 1.0, 1.25, 1.6, 2.0, 2.5, 3.2, 4.0, 5.0)
    single = {
        width: rms_error(GaussianFrequencies(num_heads, num_frequencies, 3, 1 / (2 * math.pi * width)))
        for width in widths
    }
    assert mixture * 2.5 < single[0.5]
    assert mixture * 1.5 < min(single.values())
