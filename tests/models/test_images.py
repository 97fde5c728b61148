"""Image atoms against a brute-force search."""

import itertools

import pytest
import torch
from torch_geometric.data import Batch

from molflt.build import build_model
from molflt.config import AttentionConfig, ModelConfig
from molflt.models.atoms import read_atoms
from molflt.models.images import image_atoms, with_images


def by_hand(data, radius):
    """(atom, offset) of every image, up to 5 cells away, within the radius of an adsorbate atom."""
    centres = data.pos[data.tags == 2] if (data.tags == 2).any() else data.pos
    found = set()
    for offset in itertools.product(range(-5, 6), range(-5, 6), range(1)):
        shift = torch.tensor(offset, dtype=torch.float64) @ data.cell[0]
        near = torch.cdist(data.pos + shift, centres).amin(-1) < radius
        found |= {(atom, *offset) for atom in near.nonzero().flatten().tolist() if any(offset)}
    return found


@pytest.mark.parametrize("radius", [3.0, 8.0])
def test_images_are_all_those_within_the_radius_of_an_adsorbate_atom(radius, toy_structure):
    structures = [toy_structure(11, 1), toy_structure(2, 2), toy_structure(7, 3)]
    structures[2].tags = torch.zeros(7, dtype=torch.int64)
    atoms = read_atoms(Batch.from_data_list(structures), torch.float64)
    source, shift = image_atoms(atoms, radius)
    first = 0
    for index, data in enumerate(structures):
        mine = (source >= first) & (source < first + data.num_nodes)
        offsets = (shift[mine] @ torch.linalg.inv(data.cell[0])).round().long()
        ours = [(int(a) - first, *o) for a, o in zip(source[mine], offsets.tolist(), strict=True)]
        assert len(set(ours)) == len(ours)
        assert set(ours) == by_hand(data, radius), index
        first += data.num_nodes
    if radius == 8.0:
        assert max(abs(o) for _, *offset in by_hand(structures[0], radius) for o in offset) > 1


def test_images_follow_their_atoms_in_all_fields(toy_structure):
    atoms = read_atoms(Batch.from_data_list([toy_structure(5, 1), toy_structure(7, 2)]), torch.float64)
    everyone, source = with_images(atoms, 5.0)
    assert source is not None
    assert len(source) > 0
    for name in ("atomic_numbers", "tags", "graph"):
        field, extended = getattr(atoms, name), getattr(everyone, name)
        assert torch.equal(extended, torch.cat((field, field[source])))
    assert torch.equal(everyone.pos[:12], atoms.pos)
    assert with_images(atoms, None) == (atoms, None)


def softmax_model(image_radius):
    torch.manual_seed(0)
    config = ModelConfig(channels=12, num_heads=3, num_layers=2, ffn_channels=17, num_gaussians=11)
    config.displacement_channels, config.image_radius = 6, image_radius
    config.attention = AttentionConfig(kind="softmax", num_basis=5)
    return build_model(config, radius=3.7).double().eval()


def test_images_take_part_in_attention_and_are_left_out_of_the_results(toy_structure):
    data = toy_structure(11)
    with torch.no_grad():
        plain, expanded = softmax_model(None)(data), softmax_model(6.0)(data)
    assert expanded.delta_pos.shape == (11, 3)
    assert (plain.energy - expanded.energy).abs().item() > 1e-4
    open_structure = data.clone()
    open_structure.pbc = torch.zeros(1, 3, dtype=torch.bool)
    with torch.no_grad():
        plain, expanded = softmax_model(None)(open_structure), softmax_model(6.0)(open_structure)
    torch.testing.assert_close(plain.energy, expanded.energy, rtol=0, atol=0)


def test_images_make_the_lattice_vector_an_atom_is_given_in_matter_less(toy_structure, with_graph):
    """An adsorbate's surroundings within the radius are whole; what differs is what lies beyond them."""
    data = toy_structure(11)
    shifted = data.clone()
    shifted.pos = data.pos.clone()
    shifted.pos[4] += data.cell[0, 0]
    change = {}
    for radius in (None, 25.0):
        with torch.no_grad():
            model = softmax_model(radius)
            change[radius] = (model(with_graph(shifted)).energy - model(data).energy).abs().item()
    assert change[25.0] < 0.3 * change[None]
