"""The fragments of a system are out of each other's sight, and their arrangement alone is the label."""

from pathlib import Path

import numpy as np
import pytest
import torch

from molflt.data.charged_fragments import (
    BOND,
    DIAMETER,
    SEPARATION,
    SETS,
    ChargedSystem,
    arrange_open,
    arrange_sheet,
    build_charged_fragments,
    summary,
)
from molflt.data.charged_fragments_labels import COULOMB, smallest_separation
from molflt.data.datasets import OC20IS2RE
from molflt.data.transforms import RadiusGraph

SHIPPED = Path(__file__).parents[2] / "datasets" / "charged_fragments"
FRAGMENT = np.array([0, 1, 2, 3, 4, 4])
CHARGE_OF_ELEMENT = {11: 1.0, 17: -1.0}


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    folder = tmp_path_factory.mktemp("charged")
    sizes = {"train": 17, "val": 5}
    return [
        build_charged_fragments(folder / name, seed, sizes) for name, seed in (("a", 0), ("b", 0), ("c", 1))
    ]


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*.*"))}


def test_a_seed_gives_the_same_bytes_and_another_one_others(built):
    first, again, other = map(files, built)
    assert first == again
    assert set(other) == set(first)
    assert all(other[name] != first[name] for name in first)


def test_the_shipped_systems_begin_as_those_built_here(built):
    for name in SETS:
        ours, theirs = OC20IS2RE(built[0] / name, "train"), OC20IS2RE(SHIPPED / name, "train")
        for n in range(len(ours)):
            np.testing.assert_allclose(theirs[n].pos, ours[n].pos, atol=1e-3)
            np.testing.assert_allclose(theirs[n].y_relaxed, ours[n].y_relaxed, atol=1e-3)


@pytest.mark.parametrize("name", SETS)
def test_all_shipped_systems_have_the_same_near_graph_and_different_energies(name):
    samples = [sample for split in ("train", "val") for sample in OC20IS2RE(SHIPPED / name, split)]
    assert len({int(sample.sid) for sample in samples}) == len(samples) == 1000
    energies = np.array([float(sample.y_relaxed) for sample in samples])
    assert energies.std() > 0.5
    graph = RadiusGraph(SEPARATION - 0.01)
    for sample in samples:
        assert sample.atomic_numbers.tolist() == [11, 11, 17, 17, 11, 17]
        edges = graph(sample)
        assert edges.edge_index.tolist() in ([[4, 5], [5, 4]], [[5, 4], [4, 5]])
        np.testing.assert_allclose(edges.distances, BOND, atol=2e-4)


def test_open_systems_keep_their_distances_and_sheets_theirs_across_the_cell():
    rng = np.random.default_rng(2)
    for _ in range(23):
        system = arrange_open(rng)
        assert smallest_separation(system.pos, FRAGMENT) >= SEPARATION
        assert np.linalg.norm(system.pos[:, None] - system.pos, axis=-1).max() <= DIAMETER
        sheet = arrange_sheet(rng)
        assert smallest_separation(sheet.pos, FRAGMENT, sheet.cell) >= SEPARATION
        assert abs(np.linalg.norm(sheet.pos[4] - sheet.pos[5]) - BOND) < 2e-4


def test_the_label_of_a_stored_open_system_is_the_coulomb_energy_between_its_fragments():
    for sample in list(OC20IS2RE(SHIPPED / "open", "val"))[:11]:
        charges = [CHARGE_OF_ELEMENT[z] for z in sample.atomic_numbers.tolist()]
        energy = 0.0
        for i in range(6):
            for j in range(i):
                if FRAGMENT[i] != FRAGMENT[j]:
                    distance = float(torch.linalg.vector_norm(sample.pos[i].double() - sample.pos[j]))
                    energy += COULOMB * charges[i] * charges[j] / distance
        assert float(sample.y_relaxed) == pytest.approx(energy, abs=1e-4)
        assert not sample.pbc.any()


def test_a_sheet_of_a_large_cell_has_nearly_the_open_energy():
    """A neutral group of charges meets its images as a dipole, which falls with the cell cubed."""
    system = arrange_open(np.random.default_rng(5))

    def difference(length: float) -> float:
        sheet = system._replace(cell=np.diag([length, length, 30.0]))
        return abs(sheet.energy() - system.energy())

    assert difference(160.0) < 1e-3
    assert difference(160.0) < 0.2 * difference(80.0)


def test_sheets_repeat_in_two_directions(built):
    for sample in OC20IS2RE(built[0] / "sheets", "val"):
        assert sample.pbc.tolist() == [[True, True, False]]
        assert float(sample.cell[0, 2, 2]) == 30.0


def test_an_isolated_fragment_has_no_energy():
    pos = np.array([[0.0, 0.0, 0.0], [0.0, 0.0, BOND]])
    assert ChargedSystem(("Na", "Cl"), pos, np.array([0, 0]), None).energy() == 0.0


def test_the_summary_has_the_spread_that_a_model_without_the_far_part_is_left_with():
    text = summary({"open/train": [0.0, 1.0, 5.0]}, seed=3)
    # median 1: deviations 1, 0, 4; std sqrt((4 + 1 + 9) / 3)
    assert "| open/train | 3 | 2.0000 | 2.1602 | 0.00 to 5.00 | 1.6667 |" in text
    assert "--seed 3" in text
