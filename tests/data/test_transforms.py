"""Transforms of single structures: graph, Δpos, rotation, interpolation with noise."""

import pickle
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.transforms import Compose

from molflt.data.datasets import OC20IS2RE
from molflt.data.displacements import edge_displacement
from molflt.data.fields import StructureData
from molflt.data.graphs import radius_graph
from molflt.data.transforms import (
    DeltaPos,
    InterpolateNoise,
    RadiusGraph,
    RandomRotation,
    cell_and_pbc,
    random_rotation,
)
from molflt.errors import InputError

OC20_SAMPLE = Path(__file__).parents[2] / "datasets" / "oc20_sample" / "data.lmdb"


def slab(num_atoms: int = 7, seed: int = 0) -> StructureData:
    """A slab-like structure in float64 whose relaxed positions are wrapped differently."""
    generator = torch.Generator().manual_seed(seed)
    cell = torch.tensor([[5.0, 0, 0], [2, 6, 0], [0, 0, 19]], dtype=torch.float64)
    pos = torch.rand(num_atoms, 3, generator=generator, dtype=torch.float64) @ cell
    step = 0.3 * torch.randn(num_atoms, 3, generator=generator, dtype=torch.float64)
    jump = torch.randint(-1, 2, (num_atoms, 3), generator=generator).double() * torch.tensor([1.0, 1, 0])
    return StructureData(
        pos=pos,
        pos_relaxed=pos + step + jump @ cell,
        true_step=step,
        cell=cell[None],
        pbc=torch.tensor([[True, True, False]]),
        fixed=torch.arange(num_atoms) < 3,
        tags=torch.tensor([0, 0, 0, 1, 1, 2, 2])[:num_atoms],
        natoms=torch.tensor([num_atoms]),
        y_relaxed=torch.tensor([-1.5]),
        sid=torch.tensor([41]),
    )


def test_radius_graph_sets_the_three_edge_fields() -> None:
    """The transform stores what the function returns, capped as asked, and leaves its input alone."""
    data = slab()
    out = RadiusGraph(6.0, 11)(data)
    expected = radius_graph(data.pos, data.cell, data.pbc, 6.0, 11)
    for name, value in zip(("edge_index", "cell_offsets", "distances"), expected, strict=True):
        assert torch.equal(out[name], value)
    assert "edge_index" not in data
    degree = torch.bincount(RadiusGraph(6.0)(data).edge_index[1])
    strict = RadiusGraph(6.0, 4, strict_cap=True)(data)
    assert degree.max() > 4
    assert torch.equal(torch.bincount(strict.edge_index[1]), degree.clamp(max=4))


def test_a_cell_without_pbc_repeats_in_all_directions() -> None:
    """OC20's records hold no pbc and are periodic."""
    data = slab()
    del data.pbc
    edges = RadiusGraph(20.0)(data).cell_offsets
    assert edges.abs().amax(0).min() >= 1


def test_a_structure_without_cell_is_open() -> None:
    """A molecule needs neither cell nor pbc."""
    data = Data(pos=torch.tensor([[0.0, 0, 0], [1.5, 0, 0]]))
    assert RadiusGraph(2.0)(data).edge_index.tolist() == [[1, 0], [0, 1]]


def test_pbc_without_a_cell_is_refused() -> None:
    """The message names the structure."""
    data = slab()
    del data.cell
    with pytest.raises(InputError, match="structure sid 41 has pbc on but no cell"):
        cell_and_pbc(data)


def test_delta_pos_is_the_step_behind_wrapped_positions() -> None:
    """Jumps by lattice vectors between pos and pos_relaxed are gone."""
    data = slab()
    assert (data.pos_relaxed - data.pos).abs().max() > 4.0
    torch.testing.assert_close(DeltaPos()(data).delta_pos, data.true_step, rtol=0, atol=1e-12)


def test_delta_pos_of_oc20_is_small() -> None:
    """No atom of the OC20 sample moves by half a cell, though plain differences jump by over 8 Å."""
    largest, plain = 0.0, 0.0
    for data in OC20IS2RE(OC20_SAMPLE, transform=DeltaPos()):
        largest = max(largest, float(data.delta_pos.norm(dim=1).max()))
        plain = max(plain, float((data.pos_relaxed - data.pos).norm(dim=1).max()))
        assert not data.delta_pos[data.fixed].any()
    assert largest < 4.0 < 8.0 < plain


def test_delta_pos_passes_structures_without_relaxed_positions() -> None:
    """Test sets have no target: nothing is added."""
    data = slab()
    del data.pos_relaxed
    assert "delta_pos" not in DeltaPos()(data)


def test_rotation_turns_all_vectors_together() -> None:
    """pos, pos_relaxed, delta_pos and cell are multiplied by one rotation; everything else stays."""
    data = DeltaPos()(slab())
    out = RandomRotation(generator=torch.Generator().manual_seed(3))(data)
    rotation = random_rotation(generator=torch.Generator().manual_seed(3))
    for name in ("pos", "pos_relaxed", "delta_pos", "cell"):
        torch.testing.assert_close(out[name], data[name] @ rotation.T, rtol=0, atol=1e-12)
        assert not torch.allclose(out[name], data[name], atol=0.1)
    for name in ("pbc", "tags", "fixed", "natoms", "y_relaxed", "sid"):
        assert torch.equal(out[name], data[name])


def test_edges_stay_valid_under_rotation() -> None:
    """Distances recomputed from the rotated structure are those stored before."""
    data = RandomRotation()(RadiusGraph(6.0)(slab()))
    displacement = edge_displacement(data.pos, data.cell, data.edge_index, data.cell_offsets)
    torch.testing.assert_close(displacement.norm(dim=1), data.distances, rtol=0, atol=1e-10)


@pytest.mark.parametrize("about_z", [False, True])
def test_random_rotations_are_proper(about_z: bool) -> None:
    """Orthogonal with determinant +1; about z, the z axis stays where it is."""
    rotation = random_rotation(about_z, torch.Generator().manual_seed(4))
    torch.testing.assert_close(rotation @ rotation.T, torch.eye(3, dtype=torch.float64), rtol=0, atol=1e-14)
    assert torch.linalg.det(rotation).item() == pytest.approx(1.0)
    assert torch.equal(rotation[2], torch.tensor([0.0, 0, 1]).double()) == about_z


def test_random_rotations_are_uniform() -> None:
    """Over 4,000 draws a rotated axis has mean 0 and second moment 1/3; about z, 1/2 in the plane.

    Tolerance: 4 standard errors, sqrt(1/3/n) of the mean and sqrt(4/45/n) of the second moment.
    """
    generator, n = torch.Generator().manual_seed(5), 4000
    axes = torch.stack([random_rotation(generator=generator)[:, 0] for _ in range(n)])
    assert axes.mean(0).abs().max() < 4.0 * (1 / 3 / n) ** 0.5
    assert (axes.square().mean(0) - 1 / 3).abs().max() < 4.0 * (4 / 45 / n) ** 0.5
    planar = torch.stack([random_rotation(True, generator)[:, 0] for _ in range(n)])
    assert planar.mean(0)[:2].abs().max() < 4.0 * (0.5 / n) ** 0.5
    assert (planar.square().mean(0)[:2] - 0.5).abs().max() < 4.0 * (0.125 / n) ** 0.5


def test_rotation_keeps_the_dtype() -> None:
    """float32 in, float32 out, with lengths to float32 rounding."""
    data = slab()
    data.pos = data.pos.float()
    out = RandomRotation()(data)
    assert out.pos.dtype == torch.float32
    torch.testing.assert_close(out.pos.norm(dim=1), data.pos.norm(dim=1), rtol=1e-6, atol=0)


def end_point(data: Data) -> Tensor:
    return data.pos + data.delta_pos


def test_interpolation_starts_between_the_end_points() -> None:
    """Without noise a free atom starts at pos + u Δpos, 0 <= u < 1, with its own u; fixed atoms stay."""
    data = slab()
    out = InterpolateNoise(1.0, 0.0, torch.Generator().manual_seed(6))(data)
    factor = ((out.pos - data.pos) / data.true_step)[3:]
    torch.testing.assert_close(factor, factor[:, :1].expand(-1, 3), rtol=0, atol=1e-9)
    assert ((factor >= 0) & (factor < 1)).all()
    assert len(torch.unique((factor[:, 0] * 1e6).round())) == 4
    assert torch.equal(out.pos[:3], data.pos[:3])


def test_interpolation_leaves_the_end_point_and_the_target() -> None:
    """pos + delta_pos is the same image of pos_relaxed as before, and labels stay."""
    data = DeltaPos()(slab())
    out = InterpolateNoise(1.0, 0.3, torch.Generator().manual_seed(7))(data)
    torch.testing.assert_close(end_point(out), end_point(data), rtol=0, atol=1e-12)
    assert torch.equal(out.pos_relaxed, data.pos_relaxed)
    assert torch.equal(out.y_relaxed, data.y_relaxed)
    assert not torch.allclose(out.pos[3:], data.pos[3:], atol=1e-3)


def test_interpolation_takes_a_delta_pos_that_is_there() -> None:
    """After `DeltaPos` it gives what it gives alone."""
    alone = InterpolateNoise(1.0, 0.3, torch.Generator().manual_seed(7))(slab())
    after = InterpolateNoise(1.0, 0.3, torch.Generator().manual_seed(7))(DeltaPos()(slab()))
    assert torch.equal(after.pos, alone.pos)
    assert torch.equal(after.delta_pos, alone.delta_pos)


def test_interpolation_noise_has_the_given_deviation() -> None:
    """Where nothing relaxes, displacements of 3,000 coordinates have std 0.3 Å within 4 standard errors."""
    pos = torch.zeros(1000, 3, dtype=torch.float64)
    data = Data(pos=pos, pos_relaxed=pos)
    out = InterpolateNoise(1.0, 0.3, torch.Generator().manual_seed(8))(data)
    assert abs(out.pos.std().item() - 0.3) < 4.0 * 0.3 / 6000**0.5
    torch.testing.assert_close(out.delta_pos, -out.pos)


def test_interpolation_changes_the_given_share_of_structures() -> None:
    """Of 400 structures about half are changed; the others keep pos and get the plain Δpos."""
    transform = InterpolateNoise(generator=torch.Generator().manual_seed(9))
    data = slab()
    changed = 0
    for _ in range(400):
        out = transform(data)
        if torch.equal(out.pos, data.pos):
            torch.testing.assert_close(out.delta_pos, data.true_step, rtol=0, atol=1e-12)
        else:
            changed += 1
    assert abs(changed - 200) < 4 * 10


@pytest.mark.parametrize(("missing", "moved"), [((), [3, 4, 5, 6]), (("fixed",), [3, 4, 5, 6])])
def test_free_atoms_come_from_fixed_or_tags(missing: tuple[str, ...], moved: list[int]) -> None:
    """Not fixed, or where that is missing, tag > 0."""
    data = slab()
    for name in missing:
        del data[name]
    out = InterpolateNoise(1.0)(data)
    assert (out.pos != data.pos).any(1).nonzero().flatten().tolist() == moved


def test_all_atoms_are_free_where_nothing_says_otherwise() -> None:
    """A molecule has neither fixed atoms nor tags."""
    data = slab()
    del data.fixed, data.tags
    assert (InterpolateNoise(1.0)(data).pos != data.pos).any(1).all()


def test_interpolation_removes_edges_always() -> None:
    """Edges of the old positions would be stale, and a batch must not mix with and without."""
    data = RadiusGraph(6.0)(slab())
    for probability in (0.0, 1.0):
        out = InterpolateNoise(probability)(data)
        assert "edge_index" in data
        assert not {"edge_index", "cell_offsets", "distances"} & set(out.keys())


def test_interpolation_needs_relaxed_positions() -> None:
    """A set without them cannot be augmented this way, and the message says which structure."""
    data = slab()
    del data.pos_relaxed
    with pytest.raises(InputError, match="sid 41 has no pos_relaxed"):
        InterpolateNoise()(data)


@pytest.mark.parametrize("arguments", [(-0.1, 0.3), (1.1, 0.3), (0.5, -1.0), (0.5, float("nan"))])
def test_interpolation_refuses_impossible_settings(arguments: tuple[float, float]) -> None:
    """A probability outside [0, 1] and a negative or undefined deviation."""
    with pytest.raises(ValueError, match=r"probability must lie in|noise_std must be finite"):
        InterpolateNoise(*arguments)


def test_transforms_chain_and_pickle_as_data_loaders_need() -> None:
    """The usual training chain, sent through pickle, gives valid edges at the augmented positions."""
    chain = Compose([InterpolateNoise(1.0), RandomRotation(about_z=True), RadiusGraph(6.0, 50)])
    data = pickle.loads(pickle.dumps(chain))(slab())
    displacement = edge_displacement(data.pos, data.cell, data.edge_index, data.cell_offsets)
    torch.testing.assert_close(displacement.norm(dim=1), data.distances, rtol=0, atol=1e-10)
    assert data.edge_index.shape[1] > 7


def test_transforms_say_their_settings() -> None:
    """A logged configuration shows them."""
    assert repr(RadiusGraph(6.0, 50)) == "RadiusGraph(radius=6.0, max_neighbors=50, strict_cap=False)"
    assert repr(InterpolateNoise()) == "InterpolateNoise(probability=0.5, noise_std=0.3)"
    assert repr(RandomRotation(True)) == "RandomRotation(about_z=True)"
