"""The far modulation M: images, positivity, supercells, vacuum, bounds."""

import math

import pytest
import torch

from molflt.nn.far import FarModulation, PositiveGaussianSpectrum

H, N = 3, 7
SKEWED = torch.tensor([[5.0, 0.3, 0.0], [1.0, 6.0, 0.4], [0.5, -0.7, -7.0]], dtype=torch.float64)
PERIODICITIES = [(True, True, True), (True, True, False), (True, False, False), (False, False, False)]


def make_far(
    cutoff: float = 1.1, width_range: tuple[float, float] = (1.0, 1.4), **options: float
) -> FarModulation:
    """Random amplitudes and widths."""
    torch.manual_seed(0)
    far = FarModulation(H, cutoff, 5, width_range, **options).double()  # type: ignore[arg-type]
    for parameter in far.parameters():
        torch.nn.init.normal_(parameter)
    return far.requires_grad_(False)


def make_pos(num_atoms: int = N) -> torch.Tensor:
    return 2.5 * torch.randn(1, num_atoms, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def dense(far: FarModulation, cell: torch.Tensor, pbc: tuple[bool, ...], pos: torch.Tensor) -> torch.Tensor:
    return far(cell[None], torch.tensor([pbc]), pos).dense()[0]


@pytest.mark.parametrize("pbc", PERIODICITIES)
def test_modulation_is_the_sum_over_images(pbc: tuple[bool, ...]) -> None:
    far, pos = make_far(taper=False, padding_widths=7.0), make_pos()
    exact = far.image_sum(SKEWED[None], torch.tensor([pbc]), pos)[0]
    # The padding leaves exp(-7^2/2) of M(0) where a direction is open.
    tolerance = 1e-10 if all(pbc) else 1e-10 * float(far.spectrum.amplitude.sum(-1).max())
    torch.testing.assert_close(dense(far, SKEWED, pbc, pos), exact, rtol=0, atol=tolerance)


def test_modulation_is_the_cosine_sum_of_displacements() -> None:
    far, pos = make_far(cutoff=0.3), make_pos()
    lattice = far.frequencies(SKEWED[None], torch.tensor([PERIODICITIES[0]]), pos)
    found = far(SKEWED[None], torch.tensor([PERIODICITIES[0]]), pos)
    displacement = pos.unsqueeze(2) - pos.unsqueeze(1)
    waves = torch.cos(2 * math.pi * displacement @ lattice.frequencies[0, 0].T)
    expected = found.floor.unsqueeze(-1) + torch.einsum("bijr,bhr->bhij", waves, found.weights)
    torch.testing.assert_close(found.dense(), expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize("pbc", PERIODICITIES)
def test_modulation_is_positive_for_random_parameters_cells_and_cutoffs(pbc: tuple[bool, ...]) -> None:
    """The taper needs no help from the background, even for widths far below what the cutoff resolves."""
    generator = torch.Generator().manual_seed(2)
    torch.manual_seed(3)
    for _ in range(31):
        cell = 6 * torch.randn(3, 3, generator=generator, dtype=torch.float64) + 9 * torch.eye(
            3, dtype=torch.float64
        )
        if torch.linalg.det(cell).abs() < 50:
            continue
        cutoff = 0.1 + 0.15 * float(torch.rand((), generator=generator))
        far = FarModulation(H, cutoff, 5, (0.05 / cutoff, 0.6 / cutoff), background=0.0).double()
        for parameter in far.parameters():
            torch.nn.init.normal_(parameter, std=2.0)
        values = dense(far.requires_grad_(False), cell, pbc, make_pos(53))
        assert (values.amin((-2, -1)) / values.amax((-2, -1))).min() > -1e-13


def test_modulation_without_taper_and_with_too_sharp_a_width_is_negative_somewhere() -> None:
    """Negative control of the above."""
    far = make_far(cutoff=0.2, width_range=(0.4, 0.6), taper=False, background=0.0)
    assert dense(far, 2 * SKEWED, PERIODICITIES[0], make_pos(53)).min() < 0


@pytest.mark.parametrize("pbc", PERIODICITIES[:3])
@pytest.mark.parametrize("taper", [True, False])
def test_copies_in_a_supercell_share_the_weight_background_included(
    pbc: tuple[bool, ...], taper: bool
) -> None:
    far, pos = make_far(cutoff=0.2, background=0.5, taper=taper), make_pos()
    supercell = torch.cat((2 * SKEWED[:1], SKEWED[1:]))
    copies = dense(far, supercell, pbc, torch.cat((pos, pos + SKEWED[0]), dim=1))
    # With two open directions the box changes, and with it the trapezoid rule's error.
    tolerance = 1e-12 if sum(pbc) > 1 else 2e-4
    torch.testing.assert_close(
        copies[:, :N, :N] + copies[:, :N, N:], dense(far, SKEWED, pbc, pos), rtol=0, atol=tolerance
    )


def test_more_vacuum_changes_nothing_in_a_slab_and_something_in_a_crystal() -> None:
    far, pos = make_far(cutoff=0.2), make_pos()
    thicker = torch.cat((SKEWED[:2], SKEWED[2:] + 20 * SKEWED[2:]))
    for pbc, same in ((PERIODICITIES[1], True), (PERIODICITIES[0], False)):
        difference = (dense(far, thicker, pbc, pos) - dense(far, SKEWED, pbc, pos)).abs().max()
        assert (difference < 1e-13) == same


def test_background_is_the_mean_of_a_gaussian_per_periodic_direction() -> None:
    pos = make_pos()
    area = torch.linalg.cross(SKEWED[0], SKEWED[1]).norm()
    reach = math.sqrt(2 * math.pi) * 1.4
    expected = [reach**3 / torch.linalg.det(SKEWED).abs(), reach**2 / area, reach / SKEWED[0].norm(), 1.0]
    for pbc, value in zip(PERIODICITIES, expected, strict=True):
        with_it, without = (dense(make_far(background=b), SKEWED, pbc, pos) for b in (0.3, 0.0))
        torch.testing.assert_close(
            with_it - without, torch.full_like(without, 0.3 * float(value)), rtol=0, atol=1e-10
        )


def test_taper_widens_gaussians_by_a_third_of_the_squared_resolution() -> None:
    """Along one axis, from the curvature of M at 0 in a cell so large that its lattice is a continuum."""
    far = FarModulation(1, 0.25, 1, (2.9, 3.1)).double().requires_grad_(False)
    cell = 40 * torch.eye(3, dtype=torch.float64)[None]
    lattice = far.frequencies(
        cell, torch.tensor([PERIODICITIES[0]]), torch.zeros(1, 1, 3, dtype=torch.float64)
    )
    weights = far.forward(
        cell, torch.tensor([PERIODICITIES[0]]), torch.zeros(1, 1, 3, dtype=torch.float64)
    ).weights
    square = lattice.frequencies.square().sum(-1)
    # ln w_G = ln w_0 - 2 pi^2 s_eff^2 G^2 for small G.
    smallest = square[0, 0] < 1.01 / 40**2
    zero = (
        far.spectrum.amplitude[0, 0] * (math.sqrt(2 * math.pi) * far.spectrum.widths[0, 0]) ** 3 * 2 / 40**3
    )
    effective = (zero / weights[0, 0, smallest]).log() / (2 * math.pi**2 * square[0, 0, smallest])
    expected = far.spectrum.widths[0, 0] ** 2 + 1 / (3 * 0.25**2)
    # Terms of higher order at |G| = 0.1 k_c add 1.4 %; without the taper's share it would be 37 % less.
    torch.testing.assert_close(effective, expected.expand_as(effective), rtol=2e-2, atol=0)


def test_widths_stay_within_bounds_and_amplitudes_positive() -> None:
    spectrum = PositiveGaussianSpectrum(H, 3, 4, (2.0, 3.0), peak=0.7)
    torch.testing.assert_close(spectrum.closed_form(torch.zeros(1, 3)), torch.full((1, H), 0.7))
    assert bool((spectrum.widths.diff() > 0).all())
    with torch.no_grad():
        spectrum.raw_widths.copy_(torch.tensor([-1e3, 0.0, 1.0, 1e3]))
        spectrum.raw_amplitude.fill_(-30.0)
    assert spectrum.widths.min() >= 2.0
    assert spectrum.widths.max() <= 3.0
    assert spectrum.amplitude.min() > 0
    spectrum.reset_parameters()
    torch.testing.assert_close(spectrum.closed_form(torch.zeros(1, 3)), torch.full((1, H), 0.7))


def test_widths_of_all_heads_begin_spread_between_the_bounds() -> None:
    """Together they are evenly spaced in log; so no two heads begin alike."""
    widths = PositiveGaussianSpectrum(3, 3, 5, (2.0, 32.0)).widths.T.flatten()
    torch.testing.assert_close(widths, 2 * 16 ** ((torch.arange(15) + 0.5) / 15), rtol=1e-5, atol=0.0)


def test_gradients_reach_every_parameter_at_the_start() -> None:
    torch.manual_seed(0)
    far = FarModulation(H, 0.2)
    values = far(2 * SKEWED[None].float(), torch.tensor([PERIODICITIES[1]]), make_pos().float()).dense()
    (values * torch.randn(values.shape)).sum().backward()
    for parameter in far.parameters():
        assert parameter.grad is not None
        assert bool((parameter.grad.abs() > 1e-6).all())


def test_bad_arguments_are_named() -> None:
    for options, message in (
        ({"cutoff": 0.0}, "cutoff must be positive"),
        ({"background": -1.0}, "background must not be negative"),
        ({"padding_widths": 0.0}, "padding_widths be positive"),
        ({"width_range": (3.0, 2.0)}, "width_range must be"),
        ({"num_basis": 0}, "num_basis must be at least 1"),
        ({"peak": 0.0}, "peak positive"),
    ):
        with pytest.raises(ValueError, match=message):
            FarModulation(**{"num_heads": H, "cutoff": 0.2, **options})  # type: ignore[arg-type]


def test_a_cap_bounds_the_frequencies_and_keeps_the_modulation_positive() -> None:
    far = make_far(cutoff=0.5, width_range=(1.0, 2.0), max_frequencies=23)
    pos = torch.rand(1, 61, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64) @ (3 * SKEWED)
    lattice = far.frequencies(3 * SKEWED[None], torch.tensor([PERIODICITIES[0]]), pos)
    assert 13 < int((lattice.quadrature_weights > 0).sum()) <= 23
    assert dense(far, 3 * SKEWED, PERIODICITIES[0], pos).min() >= 0
    free = make_far(cutoff=0.5, width_range=(1.0, 2.0))
    smoothed, sharp = (dense(f, 3 * SKEWED, PERIODICITIES[0], pos) for f in (far, free))
    # Smoothing lowers the peak and keeps the mean.
    assert smoothed.diagonal(dim1=-2, dim2=-1).max() < 0.6 * sharp.diagonal(dim1=-2, dim2=-1).min()
    far = make_far(cutoff=0.5, width_range=(1.0, 2.0), max_frequencies=10_000)
    torch.testing.assert_close(dense(far, 3 * SKEWED, PERIODICITIES[0], pos), sharp, rtol=0, atol=0)


def test_a_cap_without_taper_is_refused() -> None:
    with pytest.raises(ValueError, match="max_frequencies needs taper=True"):
        FarModulation(H, 0.2, taper=False, max_frequencies=7)
