"""Boxes and B-splines: support, continuity, and both sides of the transform."""

import math

import pytest
import torch

from molflt.nn.local_spectra import LocalBoxSpectrum, SmoothLocalSpectrum, cardinal_b_spline


@pytest.mark.parametrize("order", [2, 3, 4, 5, 8])
def test_b_spline_is_the_convolution_of_the_box_with_the_previous_one(order: int) -> None:
    x = torch.linspace(-4.3, 4.3, 173, dtype=torch.float64)
    step = torch.linspace(-0.5, 0.5, 4001, dtype=torch.float64)
    previous = cardinal_b_spline(x[:, None] + step, order - 1)
    convolution = torch.trapezoid(previous, step, dim=-1)
    # The box's jump lies between two nodes: half a step of error for order 2.
    torch.testing.assert_close(
        cardinal_b_spline(x, order), convolution, rtol=0, atol=2e-4 if order == 2 else 1e-7
    )


def test_b_spline_of_order_four_has_its_textbook_values() -> None:
    values = cardinal_b_spline(torch.tensor([0.0, 1.0, 2.0, -1.0], dtype=torch.float64), 4)
    torch.testing.assert_close(
        values, torch.tensor([4 / 6, 1 / 6, 0.0, 1 / 6], dtype=torch.float64), rtol=0, atol=1e-15
    )


@pytest.mark.parametrize("order", [1, 2, 3, 5])
def test_f_vanishes_exactly_beyond_order_times_radius_and_not_before(order: int) -> None:
    spectrum = SmoothLocalSpectrum(1, 2, order, 1, (0.7, 0.7))
    with torch.no_grad():
        spectrum.amplitude.fill_(1.0)
    edge = order * 0.7
    inside, outside = torch.tensor([0.98 * edge, 0.1]), torch.tensor([1.02 * edge, 0.1])
    assert spectrum.closed_form(inside).item() > 0
    assert spectrum.closed_form(outside).item() == 0
    assert spectrum.closed_form(outside.flip(0)).item() == 0


def test_box_is_an_indicator_with_a_radius_per_dimension() -> None:
    spectrum = LocalBoxSpectrum(1, 2, 1)
    with torch.no_grad():
        spectrum.raw_radius.copy_(torch.tensor([1.0, 3.0]).log())
        spectrum.amplitude.fill_(0.5)
    x = torch.tensor([[0.9, -2.9], [1.1, 0.0], [0.0, 3.1], [-0.9, 2.9]])
    torch.testing.assert_close(spectrum.closed_form(x).flatten(), torch.tensor([0.5, 0.0, 0.0, 0.5]))


@pytest.mark.parametrize("order", [1, 2, 3, 4])
def test_spectrum_is_the_transform_of_the_closed_form(order: int) -> None:
    torch.manual_seed(order)
    spectrum = SmoothLocalSpectrum(2, 2, order, 3, (0.5, 1.1)).double()
    # Midpoint rule over the support, in which the box's edges fall between cells.
    axis = (torch.arange(900, dtype=torch.float64) + 0.5) / 900 * 10 - 5
    grid = torch.cartesian_prod(axis, axis)
    frequencies = torch.tensor([[[0.0, 0.0], [0.31, 0.1], [-0.7, 0.45]]], dtype=torch.float64)
    wave = (2 * math.pi * frequencies[0] @ grid.T).cos()
    expected = (wave @ spectrum.closed_form(grid)).T * (10 / 900) ** 2
    torch.testing.assert_close(spectrum(frequencies), expected, rtol=0, atol=0.05 if order == 1 else 2e-3)


def test_the_transform_of_a_box_is_exact() -> None:
    spectrum = LocalBoxSpectrum(1, 2, 1).double()
    with torch.no_grad():
        spectrum.raw_radius.copy_(torch.tensor([1.0, 3.0]).log())
        spectrum.amplitude.fill_(0.5)
    xi = torch.tensor([0.3, -0.11], dtype=torch.float64)
    factors = [
        math.sin(2 * math.pi * v * x) / (math.pi * x) for v, x in zip((1.0, 3.0), xi.tolist(), strict=True)
    ]
    assert spectrum(xi.view(1, 1, 2)).item() == pytest.approx(0.5 * factors[0] * factors[1], rel=1e-6)


def test_amplitude_is_f_at_zero_for_every_order() -> None:
    for order in (1, 2, 3, 6):
        spectrum = SmoothLocalSpectrum(2, 3, order, 5)
        torch.testing.assert_close(spectrum.closed_form(torch.zeros(3)), spectrum.amplitude.sum(-1))


def test_gradients_at_zero_frequency_are_finite() -> None:
    spectrum = SmoothLocalSpectrum(2, 3, 2, 5)
    frequencies = torch.zeros(1, 1, 3, requires_grad=True)
    spectrum(frequencies).sum().backward()
    assert frequencies.grad is not None
    assert torch.equal(frequencies.grad, torch.zeros(1, 1, 3))
    assert spectrum.raw_radius.grad is not None
    assert (spectrum.raw_radius.grad != 0).all()


def test_bad_arguments_are_named() -> None:
    with pytest.raises(ValueError, match=r"order must be from 1 to 8 .* got 0"):
        SmoothLocalSpectrum(1, 3, 0)
    with pytest.raises(ValueError, match="radius_range must be"):
        LocalBoxSpectrum(1, 3, 2, (3.0, 1.0))
