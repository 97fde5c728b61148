"""Periodic radius graphs, minimum images and edge displacements, against brute force and OC20 itself."""

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from ase import Atoms
from ase.build import bulk
from ase.neighborlist import neighbor_list
from torch import Tensor

from molflt.data.datasets import OC20IS2RE
from molflt.data.displacements import edge_displacement, minimum_image
from molflt.data.graphs import SHELL_TOLERANCE, radius_graph
from molflt.data.transforms import random_rotation
from molflt.errors import InputError

OC20_SAMPLE = Path(__file__).parents[2] / "datasets" / "oc20_sample" / "data.lmdb"

CELLS = {
    "orthorhombic": ([[4.0, 0, 0], [0, 5, 0], [0, 0, 3]], (True, True, True)),
    "triclinic": ([[4.0, 0.5, 0], [1, 5, -0.3], [-0.7, 0.9, 3.5]], (True, True, True)),
    "strongly skewed": ([[4.0, 0, 0], [11, 5, 0], [-7, 9, 3]], (True, True, True)),
    "left-handed": ([[4.0, 0, 0], [1, 5, 0], [0, 0.5, -3]], (True, True, True)),
    "smaller than the radius": ([[1.3, 0, 0], [0.2, 1.7, 0], [0, 0.1, 1.1]], (True, True, True)),
    "slab with a zero open vector": ([[4.0, 0, 0], [1, 5, 0], [0, 0, 0]], (True, True, False)),
    "slab with its open vector in the plane": ([[4.0, 0, 0], [1, 5, 0], [2, 2, 0]], (True, True, False)),
    "slab open along b": ([[4.0, 1, 0], [0, 0, 0], [1, 1, 5]], (True, False, True)),
    "chain": ([[0.0, 0, 0], [0, 3, 1], [0, 0, 0]], (False, True, False)),
    "open": ([[0.0, 0, 0], [0, 0, 0], [0, 0, 0]], (False, False, False)),
    "open in a box that does not matter": ([[2.0, 0, 0], [0, 2, 0], [0, 0, 2]], (False, False, False)),
}


def brute_force(pos: Tensor, cell: Tensor, pbc: Tensor, radius: float) -> dict[tuple[int, ...], float]:
    """All edges (sender, receiver, offsets) and their distances, from every image that could matter."""
    found = {}
    # |offset| <= (radius + extent) / plane spacing along each periodic direction.
    rows = cell[pbc].numpy()
    reach = np.zeros(3, dtype=int)
    extent = float((pos - pos.mean(0)).norm(dim=1).max()) * 2 if len(pos) else 0.0
    if len(rows):
        spacing = 1.0 / np.linalg.norm(np.linalg.pinv(rows), axis=0)
        reach[pbc.numpy()] = np.ceil((radius + extent) / spacing).astype(int)
    offsets = torch.tensor(list(itertools.product(*(range(-n, n + 1) for n in reach))))
    shifts = offsets.double() @ cell
    for sender, receiver in itertools.product(range(len(pos)), repeat=2):
        distances = (pos[sender] - pos[receiver] + shifts).norm(dim=1)
        for image in (distances < radius).nonzero().flatten().tolist():
            if sender != receiver or offsets[image].any():
                found[(sender, receiver, *offsets[image].tolist())] = float(distances[image])
    return found


def as_dict(edge_index: Tensor, cell_offsets: Tensor, distances: Tensor) -> dict[tuple[int, ...], float]:
    keys = torch.cat([edge_index, cell_offsets.T]).T.tolist()
    edges = dict(zip(map(tuple, keys), distances.tolist(), strict=True))
    assert len(edges) == len(keys), "an edge is listed twice"
    return edges


def random_system(name: str, num_atoms: int, seed: int, spread: float) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    cell, pbc = CELLS[name]
    pos = spread * torch.randn(num_atoms, 3, generator=generator, dtype=torch.float64)
    return pos, torch.tensor(cell, dtype=torch.float64), torch.tensor(pbc)


def displacements_of(pos: Tensor, cell: Tensor, pbc: Tensor, radius: float) -> tuple[Tensor, Tensor]:
    edge_index, offsets, _ = radius_graph(pos, cell, pbc, radius)
    return edge_index, edge_displacement(pos, cell[None], edge_index, offsets)


def canonical(edge_index: Tensor, displacement: Tensor) -> list[tuple[float, ...]]:
    """Edges by atoms and displacement to 1e-6 Å, in an order that noise does not change."""
    rounded = (displacement * 1e6).round().long() // 100
    return sorted(map(tuple, torch.cat([edge_index, rounded.T]).T.tolist()))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", CELLS)
def test_radius_graph_equals_a_search_over_all_images(name: str, seed: int) -> None:
    """Edges, offsets and distances are those of brute force, for atoms far outside the cell too."""
    spread = 2.0 if name == "smaller than the radius" else (5.0, 3.0, 1.5)[seed]
    pos, cell, pbc = random_system(name, 5 if name == "smaller than the radius" else 7, seed, spread)
    edges = as_dict(*radius_graph(pos, cell, pbc, 3.7))
    expected = brute_force(pos, cell, pbc, 3.7)
    assert edges.keys() == expected.keys()
    assert all(abs(edges[key] - expected[key]) < 1e-12 for key in edges)


def test_radius_graph_equals_that_of_ase() -> None:
    """The same pairs and distances as ase.neighborlist on a distorted fcc crystal of 108 atoms."""
    atoms = bulk("Cu", cubic=True) * (3, 3, 3)
    atoms.rattle(0.1, seed=5)
    i, j, shifts, distances = neighbor_list("ijSd", atoms, 5.0)
    expected = {
        (b, a, *s): d
        for a, b, s, d in zip(i.tolist(), j.tolist(), shifts.tolist(), distances.tolist(), strict=True)
    }
    edges = as_dict(
        *radius_graph(
            torch.tensor(atoms.positions), torch.tensor(atoms.cell[:]), torch.tensor([True] * 3), 5.0
        )
    )
    assert edges.keys() == expected.keys()
    assert max(abs(edges[key] - expected[key]) for key in edges) < 1e-10


def test_one_atom_sees_its_own_images_and_not_itself() -> None:
    """A simple cubic lattice of constant 3 Å has 6 neighbours at 3 Å and 12 at 3√2 Å."""
    arguments = torch.zeros(1, 3, dtype=torch.float64), 3.0 * torch.eye(3).double(), torch.tensor([True] * 3)
    _, offsets, distances = radius_graph(*arguments, 4.3)
    torch.testing.assert_close(distances, torch.tensor([3.0] * 6 + [18.0**0.5] * 12, dtype=torch.float64))
    assert offsets[:6].abs().sum(1).tolist() == [1] * 6
    assert offsets[6:].abs().sum(1).tolist() == [2] * 12


def test_pairs_at_exactly_the_radius_are_left_out() -> None:
    """The cutoff is open: distance < radius."""
    pos = torch.tensor([[0.0, 0, 0], [3, 0, 0], [0, 2.5, 0]], dtype=torch.float64)
    edge_index, _, distances = radius_graph(pos, torch.zeros(3, 3).double(), torch.zeros(3).bool(), 3.0)
    assert edge_index.tolist() == [[2, 0], [0, 2]]
    assert distances.tolist() == [2.5, 2.5]


def test_coincident_atoms_are_neighbours_at_distance_zero() -> None:
    """Two atoms in one place keep both of their edges."""
    pos = torch.tensor([[1.0, 2, 3], [1, 2, 3]], dtype=torch.float64)
    edge_index, offsets, distances = radius_graph(
        pos, 20.0 * torch.eye(3).double(), torch.tensor([True] * 3), 2.0
    )
    assert edge_index.tolist() == [[1, 0], [0, 1]]
    assert distances.tolist() == [0.0, 0.0]
    assert not offsets.any()


@pytest.mark.parametrize("num_atoms", [0, 1, 2])
@pytest.mark.parametrize("pbc", [(True, True, True), (False, False, False)])
def test_structures_without_edges_give_empty_graphs(num_atoms: int, pbc: tuple[bool, ...]) -> None:
    """No atoms, one atom, and two far apart: no edges, in the declared dtypes, capped or not."""
    pos = torch.arange(num_atoms).float()[:, None] * torch.tensor([[10.0, 0, 0]])
    for cap in (None, 3):
        edge_index, offsets, distances = radius_graph(pos, 30.0 * torch.eye(3), torch.tensor(pbc), 4.0, cap)
        assert (edge_index.tolist(), offsets.tolist(), distances.tolist()) == ([[], []], [], [])
        assert (edge_index.dtype, offsets.dtype, distances.dtype) == (torch.int64, torch.int64, torch.float32)


def test_distances_follow_the_dtype_of_positions() -> None:
    """float32 positions give float32 distances, right to their rounding."""
    pos, cell, pbc = random_system("triclinic", 7, 0, 5.0)
    _, _, exact = radius_graph(pos, cell, pbc, 3.7)
    edge_index, offsets, distances = radius_graph(pos.float(), cell.float(), pbc, 3.7)
    assert distances.dtype == torch.float32
    torch.testing.assert_close(distances.double(), exact, rtol=0, atol=1e-5)
    displacement = edge_displacement(pos.float(), cell.float()[None], edge_index, offsets)
    torch.testing.assert_close(displacement.norm(dim=1), distances, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["triclinic", "slab with a zero open vector"])
def test_edges_are_sorted_by_receiver_distance_sender_and_offsets(name: str) -> None:
    """The order is that of sorting the rows (distance to 1e-6 Å), whatever the neighbour search returns."""
    pos, cell, pbc = random_system(name, 7, 1, 4.0)
    edge_index, offsets, distances = radius_graph(pos, cell, pbc, 4.5)
    steps = (distances * 1e6).round().long()
    rows = torch.stack([edge_index[1], steps, edge_index[0], *offsets.T]).T.tolist()
    assert rows == sorted(rows)


def test_sorting_survives_offsets_that_fit_no_single_key() -> None:
    """Atoms billions of cells apart in three directions still come out sorted and right."""
    cell, pbc = 3.0 * torch.eye(3, dtype=torch.float64), torch.tensor([True] * 3)
    far = torch.tensor([[0.0, 0, 0], [1, 0, 0], [0, 1, 0]], dtype=torch.float64)
    far[1] += 3.0e6 * torch.tensor([1.0, 0, 0])
    far[2] += 3.0e6 * torch.tensor([0.0, 1, -1])
    edge_index, offsets, distances = radius_graph(far, cell, pbc, 4.5)
    displacement = edge_displacement(far, cell[None], edge_index, offsets)
    torch.testing.assert_close(displacement.norm(dim=1), distances, rtol=0, atol=1e-8)
    rows = torch.stack(
        [edge_index[1], (distances * 1e6).round().long(), edge_index[0], *offsets.T]
    ).T.tolist()
    assert rows == sorted(rows)
    near = far.clone()
    near[1:] = torch.tensor([[1.0, 0, 0], [0, 1, 0]])
    torch.testing.assert_close(radius_graph(near, cell, pbc, 4.5)[2], distances, rtol=0, atol=1e-8)


def test_each_edge_has_its_reverse() -> None:
    """Without a cap, (i, j, n) comes with (j, i, -n)."""
    pos, cell, pbc = random_system("strongly skewed", 7, 2, 5.0)
    edges = as_dict(*radius_graph(pos, cell, pbc, 4.1))
    assert all(edges[(b, a, -x, -y, -z)] == pytest.approx(d) for (a, b, x, y, z), d in edges.items())


@pytest.mark.parametrize(("cap", "kept"), [(1, 6), (6, 6), (7, 18), (18, 18), (19, 26), (26, 26), (99, 26)])
def test_the_cap_never_cuts_a_shell(cap: int, kept: int) -> None:
    """The shells of a simple cubic lattice hold 6, 12 and 8 atoms: a cap keeps whole ones only."""
    pos = torch.tensor([[0.1, 0.2, 0.3]])
    distances = radius_graph(pos, 3.0 * torch.eye(3), torch.tensor([True] * 3), 5.5, cap)[2]
    assert len(distances) == kept


@pytest.mark.parametrize("cap", [1, 5, 6, 7, 19])
def test_a_strict_cap_keeps_exactly_the_nearest(cap: int) -> None:
    """With strict_cap the edges are the first ones of the uncapped, sorted list."""
    pos = torch.tensor([[0.1, 0.2, 0.3]])
    arguments = pos, 3.0 * torch.eye(3), torch.tensor([True] * 3), 5.5
    capped = radius_graph(*arguments, cap, strict_cap=True)
    for kept, full in zip(capped, radius_graph(*arguments), strict=True):
        expected = full[:, :cap] if full is not capped[0] and full.shape[0] == 2 else full[:cap]
        assert torch.equal(kept, expected)


def test_the_cap_counts_per_receiver() -> None:
    """On a line of atoms each receiver keeps its own nearest, though a sender may serve many."""
    pos = torch.tensor([[0.0, 0, 0], [1.0, 0, 0], [2.1, 0, 0], [3.3, 0, 0]])
    edge_index, _, _ = radius_graph(pos, torch.zeros(3, 3), torch.zeros(3).bool(), 9.0, 1)
    assert edge_index.tolist() == [[1, 0, 1, 2], [0, 1, 2, 3]]


def test_distances_within_the_tolerance_are_one_shell() -> None:
    """Half the tolerance apart both stay, twice the tolerance apart the farther goes."""
    for gap, kept in ((0.5 * SHELL_TOLERANCE, 2), (2.0 * SHELL_TOLERANCE, 1)):
        pos = torch.tensor([[0.0, 0, 0], [2.0, 0, 0], [-2.0 - gap, 0, 0]])
        edge_index, _, _ = radius_graph(pos, torch.zeros(3, 3), torch.zeros(3).bool(), 3.0, 1)
        assert (edge_index[1] == 0).sum() == kept


def test_oc20_edges_are_reproduced_where_no_cap_falls() -> None:
    """Edges, offsets and distances of the OC20 sample, for every atom with fewer than 50 neighbours."""
    compared = 0
    for data in OC20IS2RE(OC20_SAMPLE):
        ours = as_dict(*radius_graph(data.pos, data.cell, data.pbc, 6.0, 50, strict_cap=True))
        oc20 = as_dict(data.edge_index, data.cell_offsets, data.distances)
        degree = torch.bincount(
            radius_graph(data.pos, data.cell, data.pbc, 6.0)[0][1], minlength=len(data.pos)
        )
        ours = {key: d for key, d in ours.items() if degree[key[1]] < 50}
        oc20 = {key: d for key, d in oc20.items() if degree[key[1]] < 50}
        assert ours.keys() == oc20.keys()
        assert max(abs(ours[key] - oc20[key]) for key in ours) < 1e-5
        compared += len(ours)
    assert compared == 11751


def test_oc20_edges_differ_only_at_the_distance_of_the_cap() -> None:
    """Where the cap falls, OC20 keeps 49 or 50 nearest; all that differ lie at the 49th or 50th distance."""
    capped = 0
    for data in OC20IS2RE(OC20_SAMPLE):
        full_index, _, full_distances = radius_graph(data.pos, data.cell, data.pbc, 6.0)
        ours = as_dict(*radius_graph(data.pos, data.cell, data.pbc, 6.0, 50, strict_cap=True))
        whole_shells = as_dict(*radius_graph(data.pos, data.cell, data.pbc, 6.0, 50))
        oc20 = as_dict(data.edge_index, data.cell_offsets, data.distances)
        assert oc20.keys() <= whole_shells.keys()
        for atom in range(len(data.pos)):
            nearest = full_distances[full_index[1] == atom]
            if len(nearest) < 50:
                continue
            capped += 1
            theirs = {key for key in oc20 if key[1] == atom}
            mine = {key: d for key, d in ours.items() if key[1] == atom}
            assert len(mine) == 50
            assert len(theirs) in (49, 50)
            for key in theirs ^ mine.keys():
                distance = whole_shells[key]
                assert nearest[48] - 1e-5 < distance < nearest[49] + 1e-5
    assert capped == 211


@pytest.mark.parametrize("name", ["triclinic", "slab with a zero open vector"])
def test_permuting_atoms_permutes_the_graph(name: str) -> None:
    """Renaming the atoms renames the edges and changes nothing else."""
    pos, cell, pbc = random_system(name, 7, 3, 4.0)
    order = torch.randperm(7, generator=torch.Generator().manual_seed(0))
    edges = as_dict(*radius_graph(pos[order], cell, pbc, 4.1))
    names = order.tolist()
    renamed = {(names[a], names[b], *offset): d for (a, b, *offset), d in edges.items()}
    assert renamed == pytest.approx(as_dict(*radius_graph(pos, cell, pbc, 4.1)))


@pytest.mark.parametrize("name", ["triclinic", "strongly skewed", "slab with a zero open vector"])
def test_wrapping_atoms_changes_offsets_and_not_displacements(name: str) -> None:
    """Shifting single atoms by lattice vectors leaves every displacement as it was."""
    pos, cell, pbc = random_system(name, 7, 4, 3.0)
    shifts = torch.randint(-3, 4, (7, 3), generator=torch.Generator().manual_seed(1)) * pbc
    moved = pos + shifts.double() @ cell
    before, after = displacements_of(pos, cell, pbc, 4.1), displacements_of(moved, cell, pbc, 4.1)
    assert canonical(*before) == canonical(*after)
    assert not torch.equal(radius_graph(pos, cell, pbc, 4.1)[1], radius_graph(moved, cell, pbc, 4.1)[1])


def test_atoms_of_a_supercell_have_the_neighbours_of_their_originals() -> None:
    """In a 2 x 1 x 3 supercell each atom sees the displacements that its original sees."""
    pos, cell, pbc = random_system("triclinic", 5, 5, 2.0)
    repeats = torch.cartesian_prod(torch.arange(2), torch.arange(1), torch.arange(3)).double()
    many = (pos[None] + (repeats @ cell)[:, None]).reshape(-1, 3)
    large = cell * torch.tensor([[2.0], [1], [3]])
    index, displacement = displacements_of(pos, cell, pbc, 4.1)
    many_index, many_displacement = displacements_of(many, large, pbc, 4.1)
    expected = canonical(index, displacement)
    for copy in range(6):
        mine = torch.div(many_index[1], 5, rounding_mode="floor") == copy
        assert canonical(many_index[:, mine] % 5, many_displacement[mine]) == expected


@pytest.mark.parametrize(
    "change",
    [
        [[1, 0, 0], [1, 1, 0], [0, 0, 1]],
        [[0, 1, 0], [1, 0, 0], [0, 0, 1]],
        [[1, 0, 0], [-7, 1, 0], [40, 3, -1]],
    ],
)
def test_equivalent_cells_give_the_same_displacements(change: list[list[int]]) -> None:
    """Another basis of the same lattice, left-handed or very skewed, changes only the offsets."""
    pos, cell, pbc = random_system("triclinic", 7, 6, 3.0)
    other = torch.tensor(change, dtype=torch.float64) @ cell
    before, after = displacements_of(pos, cell, pbc, 4.1), displacements_of(pos, other, pbc, 4.1)
    assert canonical(*before) == canonical(*after)


@pytest.mark.parametrize("name", ["triclinic", "slab with a zero open vector", "open"])
def test_rotating_cell_and_positions_together_keeps_the_graph(name: str) -> None:
    """Edges and offsets stay, displacements turn along."""
    pos, cell, pbc = random_system(name, 7, 7, 3.0)
    rotation = random_rotation(generator=torch.Generator().manual_seed(2))
    before = as_dict(*radius_graph(pos, cell, pbc, 4.1))
    after = as_dict(*radius_graph(pos @ rotation.T, cell @ rotation.T, pbc, 4.1))
    assert after == pytest.approx(before, abs=1e-10)


@pytest.mark.parametrize("radius", [0.0, -1.0, float("nan"), float("inf")])
def test_a_radius_that_is_none_is_refused(radius: float) -> None:
    """The message names the argument and the value."""
    with pytest.raises(ValueError, match=f"radius must be finite and positive, got {radius}"):
        radius_graph(torch.zeros(1, 3), torch.eye(3), torch.zeros(3).bool(), radius)


def test_a_cap_below_one_is_refused() -> None:
    """max_neighbors=0 would silently drop the graph."""
    with pytest.raises(ValueError, match="max_neighbors must be at least 1, got 0"):
        radius_graph(torch.zeros(1, 3), torch.eye(3), torch.zeros(3).bool(), 3.0, 0)


@pytest.mark.parametrize(
    ("pos", "cell", "message"),
    [
        ([[0, 0, 0], [0, float("nan"), 0]], np.eye(3), "position of atom 1 is NaN or infinite"),
        ([[0, 0, float("inf")]], np.eye(3), "position of atom 0 is NaN or infinite"),
        ([[0, 0, 0]], np.full((3, 3), np.nan), "cell holds NaN"),
        ([[0, 0, 0]], np.diag([3.0, 0, 3]), "cell vector b has zero length"),
        ([[0, 0, 0]], [[1, 0, 0], [2, 0, 0], [0, 0, 1]], "cell vectors a, b, c are linearly dependent"),
        ([[0, 0, 0]], np.diag([4.8e16, 4, 4]), "cell vector a is 4.8e\\+16 Å long"),
        ([[0, 0, 0]], np.eye(3) * 1e-3, "would take some .* steps to connect"),
    ],
)
def test_positions_and_cells_without_a_graph_are_refused(pos: list, cell: list, message: str) -> None:
    """Instead of a crash of the neighbour search, an infinite loop or exhausted memory."""
    with pytest.raises(InputError, match=message):
        radius_graph(
            torch.tensor(pos, dtype=torch.float64),
            torch.tensor(np.array(cell), dtype=torch.float64),
            torch.tensor([True] * 3),
            5.0,
        )


@pytest.mark.parametrize(
    ("lengths", "radius"),
    [
        ((1000.0, 1000.0, 3.0), 0.5),
        ((5.5, 68216.0, 5.5), 0.331),
        ((110000.0, 1.1, 1.1), 1.0),
        ((5.0, 5.0, 1e4), 0.5),
    ],
)
def test_vast_and_thin_cells_are_searched(lengths: tuple[float, ...], radius: float) -> None:
    """Boxes in which vesin alone divides by zero and ends the process give their one pair."""
    size = torch.tensor(lengths, dtype=torch.float64)
    pos = torch.tensor([[0.0, 0, 0], [0.3, 0.1, 0], [0.5, 0.5, 0.5]], dtype=torch.float64)
    pos[2] *= size
    edges = as_dict(*radius_graph(pos, torch.diag(size), torch.tensor([True] * 3), radius))
    assert edges == {(0, 1, 0, 0, 0): pytest.approx(0.1**0.5), (1, 0, 0, 0, 0): pytest.approx(0.1**0.5)}


def shortest_image(displacement: Tensor, cell: Tensor, pbc: Tensor, reach: int) -> Tensor:
    """Length of the shortest of all images within `reach` cells."""
    ranges = [range(-reach, reach + 1) if periodic else (0,) for periodic in pbc]
    shifts = torch.cartesian_prod(*(torch.tensor(list(r), dtype=torch.float64) for r in ranges)) @ cell
    return torch.stack([(one + shifts).norm(dim=-1).min() for one in displacement])


@pytest.mark.parametrize("name", CELLS)
def test_minimum_image_is_the_shortest_of_all_images(name: str) -> None:
    """As long as the shortest found by brute force, and a lattice vector away from what was given."""
    generator = torch.Generator().manual_seed(8)
    cell, pbc = torch.tensor(CELLS[name][0], dtype=torch.float64), torch.tensor(CELLS[name][1])
    displacement = 2.0 * torch.randn(29, 3, generator=generator, dtype=torch.float64)
    nearest = minimum_image(displacement, cell, pbc)
    expected = shortest_image(displacement, cell, pbc, 31)
    torch.testing.assert_close(nearest.norm(dim=1), expected, rtol=0, atol=1e-10)
    if pbc.any():
        steps = (nearest - displacement) @ torch.linalg.pinv(cell[pbc])
        torch.testing.assert_close(steps, steps.round(), rtol=0, atol=1e-9)
    else:
        assert torch.equal(nearest, displacement)


def test_a_step_shorter_than_half_of_every_lattice_vector_stays_as_it_is() -> None:
    """Bit by bit, beside one that is brought back, in float32."""
    cell = torch.tensor(CELLS["strongly skewed"][0], dtype=torch.float64)
    step = torch.tensor([[0.1, -0.2, 0.3], [0.0, 0.1, -0.1]])
    moved = torch.stack([step[0], step[1] + (cell[0] + cell[2]).float()])
    nearest = minimum_image(moved, cell, torch.tensor([True] * 3))
    assert torch.equal(nearest[0], step[0])
    torch.testing.assert_close(nearest[1], step[1], rtol=0, atol=1e-5)


def test_rounding_fractional_coordinates_would_fail_where_minimum_image_does_not() -> None:
    """In a skewed cell the usual rounding returns an image that is not the shortest."""
    cell = torch.tensor(CELLS["strongly skewed"][0], dtype=torch.float64)
    displacement = torch.tensor([[3.0, 2.5, 1.4]], dtype=torch.float64)
    fractional = displacement @ torch.linalg.inv(cell)
    rounded = (fractional - fractional.round()) @ cell
    exact = minimum_image(displacement, cell, torch.tensor([True] * 3))
    assert rounded.norm() > exact.norm() + 1.0


def test_minimum_image_keeps_shape_and_dtype() -> None:
    """Leading dimensions, float32 and OC20's [1, 3, 3] cell pass through."""
    displacement = torch.tensor([[[9.0, 0, 0], [0.5, -9, 0]]])
    nearest = minimum_image(displacement, 10.0 * torch.eye(3)[None], torch.tensor([[True, True, False]]))
    torch.testing.assert_close(nearest, torch.tensor([[[-1.0, 0, 0], [0.5, 1, 0]]]))


def test_edge_displacement_uses_the_cell_of_each_graph() -> None:
    """In a batch, every edge is shifted by its own graph's lattice vectors."""
    pos = torch.tensor([[0.0, 0, 0], [1, 0, 0], [0, 2, 0], [0, 0, 5]])
    cell = torch.stack([torch.diag(torch.tensor([3.0, 4, 5])), torch.diag(torch.tensor([7.0, 8, 9]))])
    edge_index, offsets = torch.tensor([[1, 3], [0, 2]]), torch.tensor([[-1, 0, 2], [0, 1, -1]])
    displacement = edge_displacement(pos, cell, edge_index, offsets, torch.tensor([0, 0, 1, 1]))
    assert displacement.tolist() == [[-2.0, 0.0, 10.0], [0.0, 6.0, -4.0]]


def test_edge_displacement_has_exact_gradients() -> None:
    """Derivatives with respect to positions and cells pass gradcheck, the image's shift included."""
    pos, cell, pbc = random_system("triclinic", 5, 9, 2.0)
    edge_index, offsets, _ = radius_graph(pos, cell, pbc, 4.1)
    assert offsets.any()

    def lengths(pos: Tensor, cell: Tensor) -> Tensor:
        return edge_displacement(pos, cell, edge_index, offsets).square().sum(-1)

    assert torch.autograd.gradcheck(lengths, (pos.requires_grad_(), cell[None].requires_grad_()))


def test_an_fcc_crystal_has_the_shells_of_its_textbook() -> None:
    """12, 6, 24 and 12 neighbours in the primitive cell and in the cubic one."""
    for atoms in (bulk("Cu", a=4.0), bulk("Cu", a=4.0, cubic=True)):
        assert isinstance(atoms, Atoms)
        index, _, distances = radius_graph(
            torch.tensor(atoms.positions), torch.tensor(atoms.cell[:]), torch.tensor([True] * 3), 5.7
        )
        lengths, counts = torch.unique(
            (distances[index[1] == 0] ** 2 / 8.0).round(decimals=6), return_counts=True
        )
        assert lengths.tolist() == [1.0, 2.0, 3.0, 4.0]
        assert counts.tolist() == [12, 6, 24, 12]
