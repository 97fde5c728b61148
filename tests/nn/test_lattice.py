"""Reciprocal lattices: Poisson summation, equivalent descriptions, vacuum, rotation, counts, the taper."""

import math
from itertools import permutations
from typing import Any

import pytest
import torch

from molflt.nn.attention import flt_attention
from molflt.nn.feature_maps import PositiveRandomFeatures
from molflt.nn.frequencies import FrequencySample
from molflt.nn.lattice import (
    LatticeFrequencies,
    lattice_frequencies,
    smallest_width,
    taper_window,
    truncation_error,
)
from molflt.nn.lattice_rpe import image_sum, lattice_rpe
from molflt.nn.rpe import FourierRPE
from molflt.nn.spectra import GaussianBasisSpectrum, GaussianMixtureSpectrum

H, N = 2, 7
SKEWED = torch.tensor([[5.0, 0.3, 0.0], [1.0, 6.0, 0.4], [0.5, -0.7, -7.0]], dtype=torch.float64)
CUBIC = torch.diag(torch.tensor([4.0, 5.0, 7.0], dtype=torch.float64))
PBC = {
    "TTT": (True, True, True),
    "TTF": (True, True, False),
    "TFF": (True, False, False),
    "FFF": (False,) * 3,
}


def flags(name: str) -> torch.Tensor:
    return torch.tensor(PBC[name])


def make_spectrum() -> GaussianBasisSpectrum:
    """Widths 1.2 to 1.6 Å and amplitudes of both signs."""
    torch.manual_seed(0)
    return GaussianBasisSpectrum(H, 3, 3, (1.2, 1.6)).double().requires_grad_(False)


def make_pos(num_atoms: int = N) -> torch.Tensor:
    return 3 * torch.randn(1, num_atoms, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def lattice(
    cell: torch.Tensor,
    name: str = "TTT",
    pos: torch.Tensor | None = None,
    cutoff: float = 1.1,
    **options: Any,
) -> LatticeFrequencies:
    """One structure; a cutoff at which widths from 1.2 Å have fallen to 1e-15, room for 7 widths of 1.6 Å."""
    return lattice_frequencies(cell[None], flags(name)[None], cutoff, pos, open_padding=11.5, **options)


def bias(cell: torch.Tensor, pos: torch.Tensor, name: str = "TTT", **options: float) -> torch.Tensor:
    """sum_L f(r_i - r_j + L) from the frequencies, `[H, N, N]`."""
    return lattice_rpe(make_spectrum(), lattice(cell, name, pos, **options)).dense_bias(pos)[0]  # type: ignore[arg-type]


@pytest.mark.parametrize("name", PBC)
@pytest.mark.parametrize("cell", [SKEWED, CUBIC])
def test_sum_over_frequencies_equals_the_sum_over_images(name: str, cell: torch.Tensor) -> None:
    pos = make_pos(3)
    displacement = pos[0].unsqueeze(1) - pos[0]
    exact = image_sum(make_spectrum(), displacement, cell, flags(name), 20.0).permute(2, 0, 1)
    torch.testing.assert_close(bias(cell, pos, name), exact, rtol=0, atol=1e-10)


def test_images_matter() -> None:
    """Negative control of the above: in a cell of 5 Å the images are a good part of the sum."""
    pos = make_pos(3)
    alone = make_spectrum().closed_form(pos[0].unsqueeze(1) - pos[0]).permute(2, 0, 1)
    assert (bias(SKEWED, pos) - alone).abs().max() > 0.1


@pytest.mark.parametrize("name", ["TTT", "TTF"])
def test_frequencies_depend_on_the_lattice_and_not_on_the_cell(name: str) -> None:
    pos = make_pos()
    operations = [
        [[1, 1, 0], [0, 1, 0], [0, 0, 1]],
        [[1, 3, 0], [-1, -2, 0], [0, 0, 1]],
        [[-1, 0, 0], [0, 1, 0], [0, 0, 1]],
    ]
    if name == "TTT":
        operations.append([[1, 0, 2], [2, 1, 3], [0, 0, 1]])
        operations += [[[float(i == j) for j in order] for i in range(3)] for order in permutations(range(3))]
    reference = bias(SKEWED, pos, name, cutoff=0.4)
    for operation in operations:
        other = torch.tensor(operation, dtype=torch.float64) @ SKEWED
        assert abs(abs(torch.linalg.det(other)) - abs(torch.linalg.det(SKEWED))) < 1e-9
        torch.testing.assert_close(bias(other, pos, name, cutoff=0.4), reference, rtol=0, atol=1e-13)


def test_open_rows_of_the_cell_may_be_anything() -> None:
    pos = make_pos()
    reference = bias(SKEWED, pos, "TTF", cutoff=0.4)
    for row in ([0.0, 0.0, 0.0], [0.0, 0.0, 300.0], [40.0, 5.0, 1.0]):
        other = torch.cat((SKEWED[:2], torch.tensor([row], dtype=torch.float64)))
        torch.testing.assert_close(bias(other, pos, "TTF", cutoff=0.4), reference, rtol=0, atol=1e-13)


def test_an_atom_may_sit_in_any_cell() -> None:
    pos = make_pos()
    moved = pos.clone()
    moved[0, 3] += torch.tensor([2.0, -1.0, 3.0], dtype=torch.float64) @ SKEWED
    torch.testing.assert_close(
        bias(SKEWED, moved, cutoff=0.4), bias(SKEWED, pos, cutoff=0.4), rtol=0, atol=1e-13
    )
    moved[0, 3] += 0.5 * SKEWED[0]
    assert (bias(SKEWED, moved, cutoff=0.4) - bias(SKEWED, pos, cutoff=0.4)).abs().max() > 1e-3


@pytest.mark.parametrize("taper", [False, True])
@pytest.mark.parametrize("name", ["TTT", "TTF"])
def test_copies_in_a_supercell_add_up_to_the_cell(name: str, taper: bool) -> None:
    """sum over the copies c of f_super(x + c) is f_cell(x), at any cutoff."""
    pos = make_pos()
    small = lattice(SKEWED, name, pos, cutoff=0.3, taper=taper)
    large = lattice(
        torch.diag(torch.tensor([2.0, 3.0, 1.0], dtype=torch.float64)) @ SKEWED,
        name,
        pos,
        cutoff=0.3,
        taper=taper,
    )
    spectrum = make_spectrum()
    copies = [a * SKEWED[0] + b * SKEWED[1] for a in range(2) for b in range(3)]
    total = sum(lattice_rpe(spectrum, large).dense_bias(pos, pos + copy) for copy in copies)
    assert large.frequencies.shape[2] > 4 * small.frequencies.shape[2]
    torch.testing.assert_close(total, lattice_rpe(spectrum, small).dense_bias(pos), rtol=0, atol=1e-13)


@pytest.mark.parametrize("name", PBC)
def test_rotating_cell_and_positions_together_changes_nothing(name: str) -> None:
    pos = make_pos()
    rotation = torch.linalg.qr(
        torch.randn(3, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    ).Q
    # With two or three open directions the box does not turn: the trapezoid rule's error is what is left.
    tolerance = 1e-13 if name in ("TTT", "TTF") else 1e-10
    turned = bias(SKEWED @ rotation, pos @ rotation, name, cutoff=0.5 if tolerance < 1e-12 else 1.1)
    reference = bias(SKEWED, pos, name, cutoff=0.5 if tolerance < 1e-12 else 1.1)
    torch.testing.assert_close(turned, reference, rtol=0, atol=tolerance)
    assert (
        bias(SKEWED @ rotation, pos, name, cutoff=0.5) - bias(SKEWED, pos, name, cutoff=0.5)
    ).abs().max() > 1e-3 or name == "FFF"


@pytest.mark.parametrize("cutoff", [0.3, 0.6])
def test_number_of_frequencies_is_half_a_sphere_of_volume_times_cutoff_cubed(cutoff: float) -> None:
    """R = (2/3) pi V k_c^3, up to the surface: within 3 R^(1/3) + 3, a part of one shell of G."""
    for scale in (1.0, 2.0, 4.0):
        cell = scale * SKEWED
        count = int((lattice(cell, cutoff=cutoff).quadrature_weights > 0).sum())
        expected = 2 / 3 * math.pi * float(torch.linalg.det(cell).abs()) * cutoff**3
        assert abs(count - expected) < 3 * expected ** (1 / 3) + 3
        lengths = lattice(cell, cutoff=cutoff).frequencies.norm(dim=-1)
        assert lengths.min() > 0
        assert lengths.max() <= cutoff


def test_of_each_pair_of_opposite_vectors_one_is_kept() -> None:
    frequencies = lattice(SKEWED, cutoff=0.5).frequencies[0, 0]
    assert torch.cdist(frequencies, -frequencies).min() > 1e-3
    assert (torch.cdist(frequencies, frequencies) + torch.eye(len(frequencies))).min() > 1e-3
    # They are vectors of the reciprocal lattice: G.a is an integer.
    products = frequencies @ SKEWED.T
    torch.testing.assert_close(products, products.round(), rtol=0, atol=1e-12)


def test_a_batch_of_unlike_structures_equals_each_alone() -> None:
    """Padding, of atoms and of frequencies, plays no part, whatever the padded positions are."""
    cells = torch.stack((SKEWED, CUBIC, 1.7 * SKEWED, CUBIC))
    pbc = torch.stack([flags(name) for name in PBC])
    pos = make_pos(4 * N).view(4, N, 3)
    mask = torch.arange(N) < torch.tensor([[7], [5], [3], [6]])
    pos = torch.where(mask.unsqueeze(-1), pos, 1e6)
    both = lattice_frequencies(cells, pbc, 0.4, pos, mask, open_padding=5.0, taper=True)
    spectrum = make_spectrum()
    for index, count in enumerate(mask.sum(1).tolist()):
        one = slice(index, index + 1)
        real = pos[one, :count]
        alone = lattice_frequencies(cells[one], pbc[one], 0.4, real, open_padding=5.0, taper=True)
        ours = FrequencySample(*(part[one] for part in both.sample()))
        assert int((both.quadrature_weights[index] > 0).sum()) == alone.frequencies.shape[2]
        padded = LatticeFrequencies(ours[0][:, :, 1:], ours[1][..., 1:], *(part[one] for part in both[2:]))
        torch.testing.assert_close(
            lattice_rpe(spectrum, padded).dense_bias(real),
            lattice_rpe(spectrum, alone).dense_bias(real),
            rtol=0,
            atol=1e-12,
        )
        torch.testing.assert_close(both.periodic_measure[one], alone.periodic_measure)


def test_periodic_measure_is_the_length_area_or_volume() -> None:
    pos = make_pos()
    area = torch.linalg.cross(SKEWED[0], SKEWED[1]).norm()
    expected = [
        torch.linalg.det(SKEWED).abs(),
        area,
        SKEWED[0].norm(),
        torch.tensor(1.0, dtype=torch.float64),
    ]
    for name, measure in zip(PBC, expected, strict=True):
        found = lattice(SKEWED, name, pos, cutoff=0.2)
        torch.testing.assert_close(found.periodic_measure[0], measure)
        assert int(found.num_periodic) == sum(PBC[name])


def test_derivatives_in_the_cell_are_those_of_the_image_sum() -> None:
    """Under a strain of cell and positions, for TTT and, with the open direction turning, for TTF."""
    pos = make_pos(3)
    for name in ("TTT", "TTF"):
        strain = torch.zeros(3, 3, dtype=torch.float64, requires_grad=True)
        deformation = torch.eye(3, dtype=torch.float64) + strain
        moved = pos @ deformation
        reciprocal = bias(SKEWED @ deformation, moved, name)
        displacement = moved[0].unsqueeze(1) - moved[0]
        images = image_sum(make_spectrum(), displacement, SKEWED @ deformation, flags(name), 20.0)
        upstream = torch.randn(H, 3, 3, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
        ours = torch.autograd.grad((upstream * reciprocal).sum(), strain, retain_graph=True)[0]
        theirs = torch.autograd.grad((upstream * images.permute(2, 0, 1)).sum(), strain)[0]
        assert theirs.abs().max() > 0.1
        # In a slab, the images' own sum is differentiated at the same positions along the open direction.
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-9)


def test_tapered_sums_of_a_positive_f_are_positive_at_any_cutoff_and_untapered_ones_are_not() -> None:
    spectrum = GaussianBasisSpectrum(1, 3, 1, (0.5, 0.5)).double().requires_grad_(False)
    spectrum.amplitude.fill_(1.0)
    pos = torch.rand(1, 199, 3, generator=torch.Generator().manual_seed(4), dtype=torch.float64) @ (
        2 * SKEWED
    )
    lowest = {}
    for taper in (False, True):
        for cutoff in (0.21, 0.3, 0.45):
            found = lattice(2 * SKEWED, pos=pos, cutoff=cutoff, taper=taper)
            values = lattice_rpe(spectrum, found).dense_bias(pos)
            lowest[taper, cutoff] = float(values.min() / values.max())
    assert all(lowest[True, cutoff] > -1e-12 for cutoff in (0.21, 0.3, 0.45))
    assert all(lowest[False, cutoff] < -0.01 for cutoff in (0.21, 0.3, 0.45))


def test_taper_window_is_an_autocorrelation_flat_at_zero_and_zero_from_one_on() -> None:
    """Its transform in three dimensions is not negative, and its curvature is the docstring's."""
    t = torch.linspace(0, 1, 20001, dtype=torch.float64)
    window = taper_window(t)
    assert window[0] == 1
    assert (window.diff() <= 0).all()
    torch.testing.assert_close(taper_window(torch.tensor([1.0, 1.5])), torch.zeros(2))
    torch.testing.assert_close(1 - window[20], 2 / 3 * math.pi**2 * t[20] ** 2, rtol=1e-2, atol=0)
    radii = torch.linspace(0.01, 12, 301, dtype=torch.float64)
    transform = torch.trapezoid(t.square() * window * torch.sinc(2 * t * radii.unsqueeze(-1)), t)
    assert transform.min() > -1e-9 * transform.max()
    # Second moment of W per dimension: 1/3 for k_c = 1 adds to s^2 what the curvature at 0 says.
    broadened = -torch.log(window[20]) / (2 * math.pi**2 * t[20] ** 2)
    torch.testing.assert_close(broadened, torch.tensor(1 / 3, dtype=torch.float64), rtol=1e-2, atol=0)


def test_the_taper_lets_no_value_jump_when_a_vector_crosses_the_cutoff() -> None:
    pos = make_pos()
    # The shell (2, 0, 0) of a cubic cell of 4 Å sits at 0.5/Å.
    inside, outside = CUBIC * (1 + 1e-5), CUBIC * (1 - 1e-5)
    spectrum = GaussianBasisSpectrum(1, 3, 1, (0.5, 0.5)).double().requires_grad_(False)
    spectrum.amplitude.fill_(1.0)
    jumps = {}
    for taper in (False, True):
        found = [lattice(cell, cutoff=0.5, taper=taper) for cell in (inside, outside)]
        values = [lattice_rpe(spectrum, one).dense_bias(pos) for one in found]
        assert int((found[0].quadrature_weights > 0).sum()) > int((found[1].quadrature_weights > 0).sum())
        jumps[taper] = float((values[0] - values[1]).abs().max())
    assert jumps[True] < 1e-4
    assert jumps[False] > 5e-3


@pytest.mark.parametrize("error", [1e-2, 1e-3, 1e-4])
def test_widths_from_the_rule_leave_the_error_it_names(error: float) -> None:
    """In a cell of 14 Å and more, f(0) = 1; the sum's error is largest at x = 0."""
    cutoff = 0.25
    width = smallest_width(cutoff, error)
    assert truncation_error(width, cutoff) == pytest.approx(error)
    spectrum = GaussianBasisSpectrum(1, 3, 1, (width, width)).double().requires_grad_(False)
    spectrum.amplitude.fill_(1.0)
    pos = make_pos(11)
    cell = 3.5 * SKEWED
    found = lattice_rpe(spectrum, lattice(cell, cutoff=cutoff)).dense_bias(pos)[0]
    exact = image_sum(spectrum, pos[0].unsqueeze(1) - pos[0], cell, flags("TTT"), 40.0).permute(2, 0, 1)
    measured = (found - exact).abs().max()
    assert 0.3 * error < measured < 1.5 * error


def test_additive_coupling_sees_the_lattice_and_not_the_cell() -> None:
    """Lattice-vector shifts, a -> a + b and the order of vectors change nothing; a supercell does."""
    spectrum = make_spectrum()
    generator = torch.Generator().manual_seed(5)
    query, key, value = torch.randn(3, 1, H, N, 5, generator=generator, dtype=torch.float64)
    pos = make_pos()
    shifted = pos.clone()
    shifted[0, 2] += SKEWED[1] - SKEWED[2]

    def make_rpe(cell: torch.Tensor) -> FourierRPE:
        found = lattice_frequencies(cell[None], flags("TTT")[None], 0.3, num_frequencies=97)
        return lattice_rpe(spectrum, found)

    first = make_rpe(SKEWED)
    feature_map = PositiveRandomFeatures(11)
    feature_map.build(H, 2 * first.num_frequencies + 5)
    feature_map.double()

    def attend(pos: torch.Tensor, rpe: FourierRPE) -> torch.Tensor:
        return flt_attention(query, key, value, pos, feature_map=feature_map, rpe=rpe)

    reference = attend(pos, first)
    torch.testing.assert_close(attend(shifted, first), reference, rtol=0, atol=1e-11)
    shifted[0, 2] += 0.3
    assert (attend(shifted, first) - reference).abs().max() > 1e-3
    for operation in ([[1, 1, 0], [0, 1, 0], [0, 0, 1]], [[0, 0, 1], [-1, 0, 0], [0, 1, 2]]):
        other = make_rpe(torch.tensor(operation, dtype=torch.float64) @ SKEWED)
        torch.testing.assert_close(attend(pos, other), reference, rtol=0, atol=1e-11)
    double = torch.diag(torch.tensor([2.0, 1.0, 1.0], dtype=torch.float64)) @ SKEWED
    copies = torch.cat((pos, pos + SKEWED[0]), dim=1)
    query, key, value = (torch.cat((x, x), dim=2) for x in (query, key, value))
    assert (attend(copies, make_rpe(double))[:, :, :N] - reference).abs().max() > 1e-3


def test_bad_arguments_are_named() -> None:
    pos = make_pos()
    with pytest.raises(ValueError, match="cutoff must be positive"):
        lattice(SKEWED, cutoff=0.0)
    with pytest.raises(ValueError, match="pos must be given"):
        lattice(SKEWED, "TTF")
    with pytest.raises(ValueError, match="open_padding"):
        lattice_frequencies(SKEWED[None], flags("FFF")[None], 0.3, pos, open_padding=-1.0)
    with pytest.raises(ValueError, match="linearly independent"):
        lattice(torch.cat((SKEWED[:1], 2 * SKEWED[:1], SKEWED[2:])))
    with pytest.raises(ValueError, match="num_frequencies must be at least"):
        lattice_frequencies(SKEWED[None], flags("TTT")[None], 0.3, num_frequencies=2)
    with pytest.raises(ValueError, match="candidates"):
        lattice(100 * SKEWED, cutoff=1.0)
    with pytest.raises(ValueError, match="not declared even"):
        lattice_rpe(GaussianMixtureSpectrum(H, 3).double(), lattice(SKEWED, cutoff=0.3))


def test_a_cap_keeps_the_shortest_vectors_in_whole_shells() -> None:
    cube = 6.0 * torch.eye(3, dtype=torch.float64)
    # Half-shells of a simple cubic lattice: 3 of |n|^2 = 1, 6 of 2, 4 of 3, 3 of 4.
    for cap, expected in ((2, 0), (3, 3), (8, 3), (9, 9), (12, 9), (13, 13), (15, 13), (16, 16)):
        kept = lattice(cube, cutoff=0.5, max_frequencies=cap)
        assert int((kept.quadrature_weights > 0).sum()) == expected
        assert kept.frequencies.norm(dim=-1).max() < math.sqrt(4.5) / 6
    free, capped = lattice(cube, cutoff=0.5), lattice(cube, cutoff=0.5, max_frequencies=1000)
    torch.testing.assert_close(capped.quadrature_weights, free.quadrature_weights, rtol=0, atol=0)


def test_the_taper_of_a_capped_lattice_ends_at_the_first_shell_left_out() -> None:
    cube = 6.0 * torch.eye(3, dtype=torch.float64)
    kept = lattice(cube, cutoff=0.5, max_frequencies=9, taper=True)
    ratio = kept.frequencies[0, 0].norm(dim=-1) / (math.sqrt(3) / 6)
    expected = 2 / 6.0**3 * taper_window(ratio)
    torch.testing.assert_close(kept.quadrature_weights[0, 0], expected, rtol=1e-12, atol=0)


def test_a_strain_that_changes_the_capped_selection_makes_no_jump() -> None:
    """Of two vectors that swap places at the cap, the one on its way out has no weight left."""

    def bias_at(strain: float) -> torch.Tensor:
        cell = torch.diag(torch.tensor([6.0 * (1 + strain), 6.0 * (1 - strain), 5.0], dtype=torch.float64))
        kept = lattice(cell, cutoff=0.5, max_frequencies=1, taper=True)
        return lattice_rpe(make_spectrum(), kept).dense_bias(make_pos())

    jump = (bias_at(1e-7) - bias_at(-1e-7)).abs().max()
    assert jump < 1e-7
    assert (bias_at(0.2) - bias_at(-0.2)).abs().max() > 1e-3


def test_the_slope_of_a_capped_lattice_in_the_cell_is_that_of_its_values() -> None:
    """The first shell left out, where the taper ends, moves with the cell too."""

    def energy(strain: torch.Tensor) -> torch.Tensor:
        deformation = torch.eye(3, dtype=torch.float64) + strain
        kept = lattice(SKEWED @ deformation, cutoff=0.5, max_frequencies=11, taper=True)
        return lattice_rpe(make_spectrum(), kept).dense_bias(make_pos() @ deformation).square().sum()

    assert torch.autograd.gradcheck(energy, torch.zeros(3, 3, dtype=torch.float64, requires_grad=True))


def test_a_cap_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="max_frequencies must be at least 1, got 0"):
        lattice(CUBIC, max_frequencies=0)
