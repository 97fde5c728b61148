"""The radial network: isotropy, and its quadrature against known transforms and finer rules."""

import math

import pytest
import torch

from molflt.nn.radial_spectra import RadialMLPSpectrum


@pytest.mark.parametrize("dim", [1, 2, 3, 4])
def test_a_constant_network_gives_a_gaussian(dim: int) -> None:
    spectrum = RadialMLPSpectrum(2, dim, std=0.25).double()
    with torch.no_grad():
        spectrum.weight.zero_()
        spectrum.bias.copy_(torch.tensor([1.5, -0.5]))
    x = torch.linspace(-4, 5, 7 * dim, dtype=torch.float64).view(7, dim)
    gaussian = (-2 * math.pi**2 * spectrum.envelope.std[0, 0] ** 2 * x.square().sum(-1)).exp()
    expected = gaussian.unsqueeze(-1) * torch.tensor([1.5, -0.5], dtype=torch.float64)
    torch.testing.assert_close(spectrum.closed_form(x), expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("dim", [1, 2, 3])
def test_closed_form_keeps_its_promised_accuracy_at_its_promised_reach(dim: int) -> None:
    torch.manual_seed(dim)
    coarse, fine = (
        RadialMLPSpectrum(2, dim, std=0.3).double(),
        RadialMLPSpectrum(2, dim, 0.3, 32, 160).double(),
    )
    fine.load_state_dict(coarse.state_dict())
    distance = torch.linspace(0, 20 / (2 * math.pi * 0.3), 23, dtype=torch.float64)
    x = torch.zeros(23, dim, dtype=torch.float64)
    x[:, -1] = distance
    torch.testing.assert_close(coarse.closed_form(x), fine.closed_form(x), rtol=0, atol=1e-6)


def test_closed_form_is_the_inverse_transform_of_the_spectrum() -> None:
    torch.manual_seed(0)
    spectrum = RadialMLPSpectrum(2, 2, std=0.3, hidden_channels=7).double()
    axis = torch.linspace(-2.4, 2.4, 401, dtype=torch.float64)
    grid = torch.cartesian_prod(axis, axis)
    x = torch.tensor([[0.0, 0.0], [0.4, -0.3], [1.1, 0.9]], dtype=torch.float64)
    expected = (2 * math.pi * x @ grid.T).cos() @ spectrum(grid[None]).T * (axis[1] - axis[0]) ** 2
    torch.testing.assert_close(spectrum.closed_form(x), expected, rtol=0, atol=1e-4)


def test_spectrum_depends_on_the_length_of_the_frequency_alone() -> None:
    torch.manual_seed(0)
    spectrum = RadialMLPSpectrum(2, 3).double()
    rotation = torch.linalg.qr(torch.randn(3, 3, dtype=torch.float64)).Q
    frequencies = 0.3 * torch.randn(2, 7, 3, dtype=torch.float64)
    torch.testing.assert_close(spectrum(frequencies @ rotation), spectrum(frequencies), rtol=1e-12, atol=0)


def test_heads_differ() -> None:
    torch.manual_seed(0)
    value = RadialMLPSpectrum(2, 3)(torch.full((1, 1, 3), 0.1))
    assert (value[0] - value[1]).abs().item() > 1e-3


def test_gradient_at_zero_frequency_is_finite() -> None:
    spectrum = RadialMLPSpectrum(2, 3)
    frequencies = torch.zeros(1, 1, 3, requires_grad=True)
    spectrum(frequencies).sum().backward()
    assert frequencies.grad is not None
    assert frequencies.grad.isfinite().all()
