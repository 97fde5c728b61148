"""Rotation, translation and periodicity of whole models in float32, on real structures.

The weights are those of the shipped model, and others trained for some steps here, so that the RPE and the
heads are away from their start.
"""

from pathlib import Path

import pytest
import torch
from ase.build import molecule
from torch_geometric.data import Batch, Data

from molflt.bench.symmetry import bare, doubled, in_another_basis, in_other_cells, slab, translated
from molflt.build import build_dataset, build_model, build_transform
from molflt.checkpoint import load_checkpoint
from molflt.config import AttentionConfig, DataConfig, ModelConfig
from molflt.data.transforms import RandomRotation

ROOT = Path(__file__).parents[2]
RADIUS = 5.0
DATA = DataConfig(root=str(ROOT / "datasets/fcc111"), radius=RADIUS)
VARIANTS = {
    "range_separated": {"kind": "range_separated"},
    "two_normalizers": {"kind": "range_separated", "separate_normalizers": True},
    "lattice": {"sampler": "lattice", "coupling": "multiplicative"},
}
RANDOM = {"flt": {}, "flt_multiplicative": {"coupling": "multiplicative"}}


def trained(settings, dataset, steps=12, seed=0):
    """A float32 model after some steps on the first systems."""
    torch.manual_seed(seed)
    config = ModelConfig(channels=16, num_heads=2, num_layers=2, ffn_channels=16, num_gaussians=16)
    config.displacement_channels = 4
    config.attention = AttentionConfig(num_random_features=8, num_basis=5, **settings)
    model = build_model(config, RADIUS)
    batch = Batch.from_data_list([dataset[i] for i in range(8)])
    model.energy_mean.copy_(batch.y_relaxed.mean())
    model.energy_std.copy_(batch.y_relaxed.std())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        energy, delta_pos = model(batch)
        ((energy - batch.y_relaxed).abs().mean() + (delta_pos - batch.delta_pos).abs().mean()).backward()
        optimizer.step()
    return model.eval()


@pytest.fixture(scope="module", name="fcc111")
def _fcc111():
    return build_dataset(DATA, "train")


@pytest.fixture(scope="module", name="model", params=[*VARIANTS, "shipped"])
def model_under_test(request, fcc111):
    if request.param == "shipped":
        return load_checkpoint("fcc111-flt").model
    return trained(VARIANTS[request.param], fcc111)


def outputs(model, structures):
    """Energies and displacements of raw structures, batched; their graphs are made here."""
    transform = build_transform(DataConfig(radius=model.radius), training=False)
    with torch.no_grad():
        return model(Batch.from_data_list([transform(data.clone()) for data in structures]))


def oc20():
    return [bare(data) for data in build_dataset(DataConfig(str(ROOT / "datasets/oc20_sample")), None)]


def fcc111_systems(dataset, count):
    return [bare(dataset[index]) for index in range(0, len(dataset), len(dataset) // count)][:count]


def turned(structures, seed=0):
    rotate = RandomRotation(generator=torch.Generator().manual_seed(seed))
    return [rotate(data.clone()) for data in structures]


def assert_turns(model, structures):
    straight, rotated = outputs(model, structures), outputs(model, turned(structures))
    assert straight.energy.std() > 1e-2
    assert (rotated.energy - straight.energy).abs().max() < 1e-3
    rotate = RandomRotation(generator=torch.Generator().manual_seed(0))
    parts, first = [], 0
    for data in structures:
        count = data.num_nodes
        part = Data(pos=data.pos, delta_pos=straight.delta_pos[first : first + count])
        parts.append(rotate(part).delta_pos)
        first += count
    assert straight.delta_pos.abs().max() > 1e-2
    torch.testing.assert_close(rotated.delta_pos, torch.cat(parts), rtol=0, atol=1e-5)


def test_rotation_leaves_oc20_energies_within_a_mev_and_turns_displacements(model):
    assert_turns(model, oc20())


def test_rotation_leaves_100_fcc111_energies_within_a_mev_and_turns_displacements(model, fcc111):
    assert_turns(model, fcc111_systems(fcc111, 100))


MOLECULAR = {
    "spherical": {
        "sampler": "spherical",
        "coupling": "multiplicative",
        "basis_width_range": (4.0, 5.0),
        "quadrature_extent": 6.0,
    },
    "range_separated": {"kind": "range_separated"},
}


def molecules():
    """Smaller than the quadrature's extent."""
    found = []
    for name in ("CH3CH2OH", "C6H6", "H2O", "CH3COOH", "C5H5N"):
        atoms = molecule(name)
        pos = torch.tensor(atoms.positions, dtype=torch.float32)
        assert torch.pdist(pos).max() < 6.0
        found.append(
            Data(
                pos=pos,
                cell=torch.zeros(1, 3, 3),
                pbc=torch.zeros(1, 3, dtype=torch.bool),
                atomic_numbers=torch.tensor(atoms.numbers, dtype=torch.int64),
                tags=torch.zeros(len(pos), dtype=torch.int64),
            )
        )
    return found


@pytest.mark.parametrize("variant", MOLECULAR)
def test_rotation_of_molecules_is_within_a_mev_and_turns_displacements(variant, fcc111):
    assert_turns(trained(MOLECULAR[variant], fcc111, steps=5), molecules())


def test_the_additive_coupling_ties_molecules_to_the_axes_under_quadrature_too(fcc111):
    """Its random features mix cosines and sines of the absolute positions."""
    model = trained(MOLECULAR["spherical"] | {"coupling": "additive"}, fcc111, steps=5)
    change = outputs(model, turned(molecules())).energy - outputs(model, molecules()).energy
    assert change.abs().max() > 1e-3


@pytest.mark.parametrize("variant", RANDOM)
def test_random_frequencies_tie_the_energy_to_the_axes(variant, fcc111):
    """The control: what the invariant samplers are for."""
    model, structures = trained(RANDOM[variant], fcc111), fcc111_systems(fcc111, 16)
    change = outputs(model, turned(structures)).energy - outputs(model, structures).energy
    assert change.abs().max() > 1e-3


def assert_same_energies(model, structures, others, factor=1.0, tolerance=1e-4):
    first, second = outputs(model, structures).energy, outputs(model, others).energy
    mean = model.energy_mean
    torch.testing.assert_close(second - mean, factor * (first - mean), rtol=0, atol=tolerance)


def test_translation_changes_nothing(model):
    assert_same_energies(model, oc20(), [translated(data) for data in oc20()])


def test_an_atom_may_be_given_in_any_cell(model):
    assert_same_energies(model, oc20(), [in_other_cells(data) for data in oc20()])


def test_any_cell_of_the_lattice_gives_the_same_energy(model):
    assert_same_energies(model, oc20(), [in_another_basis(data) for data in oc20()])


@pytest.mark.parametrize("axis", [0, 1])
def test_a_supercell_has_twice_the_energy(model, axis):
    structures = oc20()
    doubles = [doubled(data, axis) for data in structures]
    assert_same_energies(model, structures, doubles, factor=2.0)


def test_more_vacuum_of_a_slab_changes_nothing(model):
    slabs, taller = ([slab(data, height) for data in oc20()] for height in (1.0, 1.7))
    assert_same_energies(model, slabs, taller)


def additive(fcc111):
    return trained({"sampler": "lattice", "num_frequencies": 12, "far_cutoff": 0.25}, fcc111)


def test_the_additive_coupling_on_the_lattice_passes_all_but_the_supercell(fcc111):
    model = additive(fcc111)
    test_translation_changes_nothing(model)
    test_an_atom_may_be_given_in_any_cell(model)
    test_any_cell_of_the_lattice_gives_the_same_energy(model)
    test_more_vacuum_of_a_slab_changes_nothing(model)
    structures = oc20()
    mean = model.energy_mean
    single = outputs(model, structures).energy - mean
    double = outputs(model, [doubled(data, 0) for data in structures]).energy - mean
    assert (double - 2 * single).abs().max() > 1e-2
