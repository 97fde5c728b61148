"""Energies per element by streaming least squares, and their sums over atoms."""

import pytest
import torch

from molflt.build import build_model
from molflt.config import ModelConfig
from molflt.models.references import ReferenceFit, reference_energies


def fitted(systems, energies):
    fit = ReferenceFit()
    for numbers, energy in zip(systems, energies, strict=True):
        fit.add(torch.tensor(numbers), float(energy))
    return fit.solve()


def compositions(elements, number, seed):
    """`number` systems of 3 to 19 atoms of some elements, and their count matrix."""
    generator = torch.Generator().manual_seed(seed)
    systems = []
    for _ in range(number):
        size = int(torch.randint(3, 20, (), generator=generator))
        picked = torch.randint(len(elements), (size,), generator=generator)
        systems.append([elements[index] for index in picked.tolist()])
    counts = torch.tensor([[system.count(z) for z in elements] for system in systems], dtype=torch.float64)
    return systems, counts


def test_exact_energies_per_element_are_found_again():
    """All-electron sizes, -13 to -5e5 eV, of which a rare element has one atom in 61 systems."""
    elements = [1, 6, 8, 29, 78]
    truth = torch.tensor([-13.6, -1030.0, -2041.3, -45_021.7, -501_234.5], dtype=torch.float64)
    systems, counts = compositions(elements[:4], 61, seed=1)
    systems[7].append(78)
    counts = torch.cat([counts, torch.zeros(61, 1)], dim=1)
    counts[7, 4] = 1
    references = fitted(systems, counts @ truth)
    torch.testing.assert_close(references[elements], truth, rtol=0, atol=1e-4)
    assert references.count_nonzero() == 5


def test_the_fit_is_that_of_least_squares():
    """Against torch's solver on the whole count matrix, for energies that no references explain."""
    elements = [1, 8, 47]
    systems, counts = compositions(elements, 37, seed=2)
    energies = 10 * torch.randn(37, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    expected = torch.linalg.lstsq(counts, energies.unsqueeze(1)).solution.squeeze(1)
    torch.testing.assert_close(fitted(systems, energies)[elements], expected, rtol=1e-9, atol=1e-9)


def test_open_directions_get_the_shortest_solution():
    """Two hydrogens to each oxygen everywhere: only 2 e_H + e_O is known, and (2, 1) x 4 / 5 is shortest."""
    references = fitted([[1, 1, 8], [1, 1, 8, 1, 1, 8]], [4.0, 8.0])
    assert references[1].item() == pytest.approx(1.6, abs=1e-12)
    assert references[8].item() == pytest.approx(0.8, abs=1e-12)


def test_order_of_systems_matters_by_rounding_only():
    systems, counts = compositions([1, 8, 47], 37, seed=2)
    energies = counts @ torch.tensor([-13.0, -2041.0, -144_000.0], dtype=torch.float64)
    forward, backward = fitted(systems, energies), fitted(systems[::-1], energies.flip(0))
    torch.testing.assert_close(forward, backward, rtol=1e-10, atol=0)


def test_sums_are_per_graph_and_in_float64():
    """Two graphs with mixed atoms, and an empty third."""
    references = torch.zeros(119, dtype=torch.float64)
    references[1], references[78] = -13.25, -501_234.5
    energies = reference_energies(references, torch.tensor([1, 78, 1]), torch.tensor([1, 0, 1]), 3)
    assert energies.tolist() == [-501_234.5, -26.5, 0.0]


def test_the_model_adds_them_to_its_energy_in_float64(toy_structure):
    """A float32 network beside a total energy of -2e5 eV is not rounded; Δpos and gradients are as before."""
    torch.manual_seed(0)
    model = build_model(ModelConfig(channels=24, num_heads=3, displacement_channels=6), 3.7).eval()
    data = toy_structure(11)
    plain = model(data)
    references = torch.zeros(119, dtype=torch.float64)
    references[[1, 8, 29]] = torch.tensor([-13.25, -2041.5, -45_021.75], dtype=torch.float64)
    model.element_references = references
    output = model(data)
    total = references[data.atomic_numbers].sum()
    assert total < -1e5
    assert output.energy.dtype == torch.float64
    assert abs(output.energy - total - plain.energy.double()).item() < 1e-9
    assert torch.equal(output.delta_pos, plain.delta_pos)
    gradients = [
        torch.autograd.grad(item.energy.sum(), model.energy_head.parameters()) for item in (plain, output)
    ]
    assert all(torch.equal(first, second) for first, second in zip(*gradients, strict=True))


def test_they_travel_with_the_weights_and_older_weights_have_none():
    """The buffer is in the state only where it is set."""
    model = build_model(ModelConfig(channels=24, num_heads=3, displacement_channels=6), 3.7)
    assert "element_references" not in model.state_dict()
    model.element_references = torch.arange(119, dtype=torch.float64)
    assert torch.equal(model.state_dict()["element_references"], torch.arange(119, dtype=torch.float64))
