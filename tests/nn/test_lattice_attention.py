"""The additive coupling on the reciprocal lattice: its centre, its twin, and what it is invariant under."""

import pytest
import torch

from molflt.nn.couplings import AdditiveCoupling
from molflt.nn.feature_maps import PositiveRandomFeatures
from molflt.nn.functional import softmax_attention
from molflt.nn.lattice import lattice_frequencies
from molflt.nn.lattice_attention import LatticeFLTAttention, LatticeRPE, lattice_centre
from molflt.nn.lattice_rpe import image_sum
from molflt.nn.near import NearGraph
from molflt.nn.periodic import PeriodicGeometry
from molflt.nn.spectra import GaussianBasisSpectrum

H, N, C = 3, 7, 15
CELL = torch.tensor([[5.0, 0.3, 0.0], [1.0, 6.0, 0.4], [0.5, -0.7, -7.0]], dtype=torch.float64)
OTHER_CELL = torch.tensor([[1.0, 1.0, 0.0], [0.0, 1.0, 0.0], [1.0, -1.0, 1.0]], dtype=torch.float64) @ CELL


def make_pos(num_atoms: int = N, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(num_atoms, 3, generator=generator, dtype=torch.float64) @ CELL


def geometry(pos: torch.Tensor, cell: torch.Tensor = CELL, pbc=(True, True, True)) -> PeriodicGeometry:
    none = torch.empty(0, dtype=torch.int64)
    mask = torch.ones(1, len(pos), dtype=torch.bool)
    return PeriodicGeometry(
        pos[None], mask, cell[None], torch.tensor([pbc]), NearGraph(none, none, none.double(), none.double())
    )


def make_layer(num_features: int = 11) -> LatticeFLTAttention:
    torch.manual_seed(0)
    rpe = LatticeRPE(GaussianBasisSpectrum(H, 3, 5, (1.0, 3.0)), num_frequencies=13, cutoff=0.4)
    feature_map = PositiveRandomFeatures(num_features)
    return LatticeFLTAttention(C, H, rpe=rpe, feature_map=feature_map).double()


def make_x(num_atoms: int = N) -> torch.Tensor:
    return torch.randn(1, num_atoms, C, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def centre_of(pos: torch.Tensor, cell: torch.Tensor = CELL) -> torch.Tensor:
    whole = geometry(pos, cell)
    lattice = lattice_frequencies(whole.cell, whole.pbc, 0.4)
    return lattice_centre(lattice, whole.pos, whole.atom_mask)[0]


def test_the_centre_moves_with_the_atoms_and_ignores_which_image_is_given():
    pos, shift = make_pos(), torch.tensor([1.3, -0.4, 0.9], dtype=torch.float64)
    images = pos.clone()
    images[2] += 3 * CELL[0] - CELL[2]
    centre = centre_of(pos)

    def equal_up_to_the_lattice(first: torch.Tensor, second: torch.Tensor) -> bool:
        steps = (first - second) @ torch.linalg.inv(CELL)
        return bool((steps - steps.round()).abs().max() < 1e-10)

    assert equal_up_to_the_lattice(centre_of(pos + shift), centre + shift)
    assert equal_up_to_the_lattice(centre_of(images), centre)
    assert equal_up_to_the_lattice(centre_of(pos, OTHER_CELL), centre)
    assert not equal_up_to_the_lattice(centre, centre + shift)


def test_a_crystal_whose_waves_all_vanish_has_a_finite_centre():
    grid = torch.cartesian_prod(*[torch.arange(4.0, dtype=torch.float64)] * 3) / 4
    pos = (grid @ CELL).requires_grad_()
    centre = centre_of(pos)
    assert centre.isfinite().all()
    (gradient,) = torch.autograd.grad(centre.sum() + 0.0 * pos.sum(), pos)
    assert gradient.isfinite().all()


def test_translation_other_images_and_other_cells_change_nothing():
    layer, pos, x = make_layer(), make_pos(), make_x()
    out = layer(x, geometry(pos))
    images = pos.clone()
    images[2] += 3 * CELL[0] - CELL[2]
    shift = torch.tensor([1.3, -0.4, 0.9], dtype=torch.float64)
    for same in (geometry(pos + shift), geometry(images), geometry(pos, OTHER_CELL)):
        torch.testing.assert_close(layer(x, same), out, rtol=0, atol=1e-10)
    assert (layer(x, geometry(1.1 * pos)) - out).abs().max() > 1e-3


def test_more_vacuum_changes_nothing():
    layer, pos, x = make_layer(), make_pos(), make_x()
    slab = torch.cat((CELL[:2], torch.tensor([[0.0, 0.0, 30.0]], dtype=torch.float64)))
    taller = torch.cat((CELL[:2], torch.tensor([[0.0, 0.0, 57.0]], dtype=torch.float64)))
    pbc = (True, True, False)
    out = layer(x, geometry(pos, slab, pbc))
    torch.testing.assert_close(layer(x, geometry(pos, taller, pbc)), out, rtol=0, atol=1e-12)


def test_a_supercell_gives_another_output():
    layer, pos, x = make_layer(), make_pos(), make_x()
    double = CELL * torch.tensor([2.0, 1.0, 1.0], dtype=torch.float64)[:, None]
    out = layer(torch.cat((x, x), dim=1), geometry(torch.cat((pos, pos + CELL[0])), double))
    assert (out[:, :N] - layer(x, geometry(pos))).abs().max() > 1e-4


def test_the_bias_approaches_the_sum_over_images():
    pos, spectrum = make_pos(), GaussianBasisSpectrum(H, 3, 5, (2.0, 2.5)).double()
    displacement = pos[:, None] - pos[None]
    expected = image_sum(spectrum, displacement, CELL, torch.tensor([True] * 3), reach=16.0).permute(2, 0, 1)
    errors = []
    for cutoff in (0.8, 1.6):
        rpe = LatticeRPE(spectrum, 2003, cutoff)(geometry(pos)).rpe
        errors.append((rpe.dense_bias(pos[None])[0] - expected).abs().max() / expected.abs().max())
    # The taper makes s^2 of every Gaussian s^2 + 1 / (3 cutoff^2): a quarter of that at twice the cutoff.
    assert errors[0] < 0.1
    assert 0.2 < errors[1] / errors[0] < 0.3


def test_many_features_approach_softmax_attention_with_the_same_bias():
    pos, x = make_pos(), 0.3 * make_x()
    errors = []
    for num_features in (16, 4096):
        layer = make_layer(num_features=num_features)
        positional = layer.encode_positions(geometry(pos))
        q, k, v = layer.heads(x)
        bias = AdditiveCoupling().exact_bias(positional.rpe, pos[None])
        exact = layer.merge(softmax_attention(q, k, v, bias), None)
        errors.append((layer(x, positional=positional) - exact).abs().max().item())
    # A sixteenth of the error is expected of 256 times the features.
    assert errors[1] < errors[0] / 4


def test_positions_are_required_and_sizes_checked():
    layer = make_layer()
    with pytest.raises(ValueError, match="needs a PeriodicGeometry as pos, or positional, got NoneType"):
        layer(make_x())
    with pytest.raises(ValueError, match="rpe must have num_heads=5 as the layer has, got 3"):
        LatticeFLTAttention(C, 5, rpe=layer.rpe)
    with pytest.raises(ValueError, match="num_frequencies must be at least 2"):
        LatticeRPE(GaussianBasisSpectrum(H, 3), 1, 0.2)
