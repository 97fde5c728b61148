"""Tags: OC20's own, ASE's layer numbers told apart from them, derivation from the geometry, and none."""

from pathlib import Path

import numpy as np
import pytest
from ase import Atoms
from ase.build import add_adsorbate, bcc110, bulk, fcc100, fcc111, graphene, hcp0001, molecule

from molflt.data.datasets import OC20IS2RE
from molflt.data.graphs import find_neighbors
from molflt.data.slabs import bond_reach, find_adsorbate, find_bonds, slab_frame
from molflt.data.tags import AssignedTags, assign_tags

DATASETS = Path(__file__).parents[2] / "datasets"
LAYERS = [1, 2, 3, 4]
ADSORBATES = {"none": None, "O": "O", "H": "H", "CO": molecule("CO"), "adatom": "Pt"}
HEIGHTS = {"O": 1.2, "H": 0.9, "CO": 3.1, "adatom": 2.2}


def assigned(atoms: Atoms, given: np.ndarray | None = None) -> AssignedTags:
    return assign_tags(
        atoms.numbers.astype(np.int64), atoms.positions, atoms.cell.array, atoms.pbc.astype(bool), given
    )


def tags_of(atoms: Atoms, given: np.ndarray | None = None) -> list[int]:
    tags = assigned(atoms, given).tags
    assert tags is not None
    return tags.tolist()


def platinum(layers: int, adsorbate: str = "none") -> Atoms:
    """A 2 x 2 Pt(111) slab of ase.build, with ASE's own layer tags."""
    slab = fcc111("Pt", (2, 2, layers), vacuum=9.0)
    if adsorbate != "none":
        add_adsorbate(slab, ADSORBATES[adsorbate], HEIGHTS[adsorbate], "ontop")
    return slab


def oc20_tags(layers: int, adsorbate: str) -> np.ndarray:
    """What OC20 would tag such a slab: top layer 1, below 0, adsorbate 2."""
    size = len(platinum(layers, adsorbate)) - 4 * layers
    return np.array([0] * (4 * (layers - 1)) + [1] * 4 + [2] * size)


def test_tags_of_the_oc20_sample_are_kept_as_given() -> None:
    """All 8 genuine OC20 systems are recognised, and their tags are not touched."""
    for data in OC20IS2RE(DATASETS / "oc20_sample"):
        given = data.tags.numpy()
        result = assign_tags(
            data.atomic_numbers.numpy(),
            data.pos.double().numpy(),
            data.cell[0].double().numpy(),
            data.pbc[0].numpy(),
            given,
        )
        assert (result.source, result.notes) == ("given", [])
        assert np.array_equal(result.tags, given)


def test_adsorbates_of_the_oc20_sample_are_found_without_tags() -> None:
    """The derived adsorbate is OC20's in 8 of 8 systems; 519 of 554 slab atoms get OC20's tag."""
    agree, slab_atoms = 0, 0
    for data in OC20IS2RE(DATASETS / "oc20_sample"):
        given = data.tags.numpy()
        result = assign_tags(
            data.atomic_numbers.numpy(),
            data.pos.double().numpy(),
            data.cell[0].double().numpy(),
            data.pbc[0].numpy(),
        )
        assert result.source == "derived"
        assert np.array_equal(result.tags == 2, given == 2)
        agree += int((result.tags == given)[given < 2].sum())
        slab_atoms += int((given < 2).sum())
    assert (agree, slab_atoms) == (519, 554)


def test_derived_tags_are_those_of_the_fcc111_data_set() -> None:
    """All validation systems (7 metals, 8 adsorbates), ideal and relaxed: every tag agrees."""
    count = 0
    for split in ("val_id", "val_ood_ads", "val_ood_cat", "val_ood_both"):
        for data in OC20IS2RE(DATASETS / "fcc111", split):
            for pos in (data.pos, data.pos_relaxed):
                result = assign_tags(
                    data.atomic_numbers.numpy(),
                    pos.double().numpy(),
                    data.cell[0].double().numpy(),
                    data.pbc[0].numpy(),
                )
                assert np.array_equal(result.tags, data.tags.numpy())
                count += 1
    assert count > 600


@pytest.mark.parametrize("adsorbate", ADSORBATES)
@pytest.mark.parametrize("layers", LAYERS)
def test_ase_layer_tags_are_recognised_and_not_misused(layers: int, adsorbate: str) -> None:
    """fcc111 + add_adsorbate with 1 to 4 layers, where 1 and 2 layers use only numbers that OC20 uses too."""
    atoms = platinum(layers, adsorbate)
    result = assigned(atoms, atoms.get_tags())
    assert result.source == "ase-layers"
    assert result.tags is not None
    assert result.tags.tolist() == oc20_tags(layers, adsorbate).tolist()
    assert "ASE's layer numbers" in result.notes[0]


@pytest.mark.parametrize("adsorbate", ["O", "H", "CO", "adatom"])
@pytest.mark.parametrize("layers", LAYERS)
def test_oc20_tags_on_the_same_slabs_are_taken_as_given(layers: int, adsorbate: str) -> None:
    """The same structures with OC20's numbers, though ASE's have the same set of values on thin slabs."""
    atoms = platinum(layers, adsorbate)
    given = oc20_tags(layers, adsorbate)
    result = assigned(atoms, given)
    assert result.source == "given"
    assert np.array_equal(result.tags, given)


@pytest.mark.parametrize("adsorbate", ADSORBATES)
@pytest.mark.parametrize("layers", LAYERS)
def test_derived_tags_equal_those_from_ase_layers(layers: int, adsorbate: str) -> None:
    """Dropping the field, as CIF and POSCAR do, changes the provenance and not the tags."""
    atoms = platinum(layers, adsorbate)
    for given in (None, np.zeros(len(atoms), dtype=int)):
        result = assigned(atoms, given)
        assert result.source == "derived"
        assert result.tags is not None
        assert result.tags.tolist() == oc20_tags(layers, adsorbate).tolist()


@pytest.mark.parametrize("given_kind", ["ase-layers", "given", "derived"])
def test_an_upside_down_slab_has_the_same_tags(given_kind: str) -> None:
    """With the adsorbate below, conventions and surface follow it and not the z axis."""
    atoms = platinum(2, "CO")
    given = {"ase-layers": atoms.get_tags(), "given": oc20_tags(2, "CO"), "derived": None}[given_kind]
    atoms.positions[:, 2] *= -1
    result = assigned(atoms, given)
    assert result.source == given_kind
    assert result.tags is not None
    assert result.tags.tolist() == oc20_tags(2, "CO").tolist()


@pytest.mark.parametrize(
    "given",
    [
        [5, 5, 5, 5, 5, 5, 5, 5, 0],
        [1, 0, 1, 0, 2, 0, 2, 1, 0],
        [0, 0, 0, 0, 0, 0, 0, 0, 1],
        [-1, -1, -1, -1, 1, 1, 1, 1, 2],
        [1, 1, 1, 1, 3, 3, 3, 3, 0],
        [1, 1, 1, 1, 2**40, 2**40, 2**40, 2**40, 0],
        [2, 2, 2, 2, 2, 2, 2, 2, 2],
    ],
)
def test_labels_of_another_meaning_are_not_used(given: list[int]) -> None:
    """A user's own marks are neither convention: tags are derived and the notes say so."""
    result = assigned(platinum(2, "O"), np.array(given))
    assert result.source == "derived"
    assert result.tags is not None
    assert result.tags.tolist() == oc20_tags(2, "O").tolist()
    assert "neither OC20's nor ASE's" in result.notes[1]


def test_oc20_tags_are_kept_where_the_geometry_shows_more_adsorbate() -> None:
    """On an oxidised surface, tagged 1, the derived adsorbate is mostly that oxide: the file knows better."""
    atoms = platinum(3)
    oxide = atoms[8:].copy()
    oxide.symbols[:] = "O"
    oxide.positions[:, 2] += 1.2
    atoms += oxide
    add_adsorbate(atoms, molecule("CO"), 3.1, "ontop")
    assert adsorbate_symbols(atoms) == "OOOOOC"
    given = np.array([0] * 8 + [1] * 8 + [2] * 2)
    result = assigned(atoms, given)
    assert result.source == "given"
    assert np.array_equal(result.tags, given)


@pytest.mark.parametrize("given", [None, np.array([1, 2, 2]), np.array([0, 1, 2])])
def test_all_atoms_of_a_molecule_count(given: np.ndarray | None) -> None:
    """Without a slab there are no tags, whatever the file says, and the notes mention what was left out."""
    for water in (molecule("H2O"), molecule("H2O", vacuum=6.0, pbc=True)):
        result = assigned(water, given)
        assert (result.tags, result.source) == (None, "none")
        assert result.notes == (
            []
            if given is None
            else ["tags in the file are not used: the structure is a molecule, and all its atoms count"]
        )


@pytest.mark.parametrize(
    "crystal", [bulk("Cs"), bulk("Cu"), bulk("NaCl", "rocksalt", 5.64), bulk("Si", cubic=True) * (2, 1, 1)]
)
def test_all_atoms_of_a_crystal_count(crystal: Atoms) -> None:
    """No direction has 5 Å without atoms, not even in caesium."""
    assert assigned(crystal).source == "none"


def test_a_chain_is_no_slab() -> None:
    """Periodic along one direction only: all atoms count."""
    chain = Atoms("CO", [[0, 0, 0], [1.2, 0, 0]], cell=[2.5, 0, 0], pbc=[True, False, False])
    assert assigned(chain).source == "none"


@pytest.mark.parametrize(
    "change",
    [
        [[1, 0, 0], [0, 1, 0], [1, -1, 1]],
        [[1, 0, 0], [1, 1, 0], [0, 0, 1]],
        [[1, 0, 0], [0, 1, 1], [0, 0, 1]],
        [[0, 1, 0], [1, 0, 0], [0, 0, 1]],
        [[0, 0, 1], [1, 0, 0], [0, 1, 0]],
    ],
)
def test_tags_do_not_depend_on_the_cell_that_describes_the_lattice(change: list[list[int]]) -> None:
    """Skewed, left-handed and renamed axes of the same periodic slab, also with the vacuum along a."""
    atoms = platinum(3, "CO")
    atoms.pbc = True
    atoms.set_cell(np.array(change) @ atoms.cell.array)
    assert tags_of(atoms) == oc20_tags(3, "CO").tolist()
    assert assigned(atoms, atoms.get_tags()).source == "ase-layers"


def test_tags_survive_wrapping_through_the_slab() -> None:
    """A slab cut by the cell boundary, with atoms on both ends, is put together across it."""
    atoms = platinum(3, "O")
    atoms.pbc = True
    atoms.positions[:, 2] -= atoms.positions[5, 2] + 0.1
    atoms.wrap()
    assert np.ptp(atoms.positions[:, 2]) > 15.0
    assert tags_of(atoms) == oc20_tags(3, "O").tolist()


def test_tags_do_not_depend_on_the_order_of_atoms() -> None:
    """Permuting the atoms permutes the tags."""
    atoms = platinum(3, "CO")
    order = np.random.default_rng(0).permutation(len(atoms))
    assert np.array_equal(assigned(atoms[order]).tags, np.array(tags_of(atoms))[order])


def adsorbate_symbols(atoms: Atoms) -> str:
    """Elements of the derived adsorbate, in the order of atoms."""
    return "".join(symbol for symbol, tag in zip(atoms.symbols, tags_of(atoms), strict=True) if tag == 2)


def test_a_molecule_that_shares_an_element_with_the_slab_is_found_whole() -> None:
    """NO on a nitride: the nitrogen of the molecule joins it, those of the slab do not."""
    slab = bulk("TiN", "rocksalt", 4.24, cubic=True) * (1, 1, 2)
    slab.center(vacuum=8.0, axis=2)
    top = slab.positions[:, 2].argmax()
    slab += Atoms("NO", slab.positions[top] + np.array([[0, 0, 2.0], [0, 0.6, 3.0]]))
    assert adsorbate_symbols(slab) == "NO"


@pytest.mark.parametrize(
    ("position", "expected"), [("in the top layer", ""), ("as an adatom", "Au"), ("as a closed skin", "")]
)
def test_another_metal_is_an_adsorbate_only_as_an_adatom(position: str, expected: str) -> None:
    """A single-atom alloy and a skin of another metal are slab, a lone atom on top is not."""
    atoms = fcc111("Cu", (3, 3, 4), vacuum=9.0)
    if position == "in the top layer":
        atoms.symbols[-1] = "Au"
    elif position == "as an adatom":
        add_adsorbate(atoms, "Au", 2.2, "fcc")
    else:
        atoms.symbols[-9:] = "Au"
    assert adsorbate_symbols(atoms) == expected


def test_graphene_with_a_dopant_is_a_slab_and_what_lies_on_it_is_not() -> None:
    """Nitrogen in the sheet belongs to it, oxygen above is the adsorbate."""
    atoms = graphene(size=(3, 3, 1), vacuum=9.0)
    atoms.pbc = [True, True, False]
    atoms.symbols[7] = "N"
    assert adsorbate_symbols(atoms) == ""
    atoms += Atoms("O", [atoms.positions[4] + [0, 0, 1.4]])
    assert adsorbate_symbols(atoms) == "O"


def test_a_graphene_sheet_on_a_metal_is_slab() -> None:
    """A sheet bonded through both directions is no adsorbate."""
    atoms = fcc111("Ni", (2, 2, 3), a=3.48, vacuum=9.0)
    sheet = graphene(size=(2, 2, 1), a=atoms.cell.lengths()[0] / 2)
    sheet.positions[:, 2] += atoms.positions[:, 2].max() + 2.1
    atoms += sheet
    assert adsorbate_symbols(atoms) == ""


@pytest.mark.parametrize("adsorbate", ["Br", "S", "O", "H"])
def test_a_full_monolayer_of_nonmetal_is_an_adsorbate(adsorbate: str) -> None:
    """Four atoms on the four sites of Cu(111) 2 x 2, closer to each other than Br2 molecules are."""
    atoms = fcc111("Cu", (2, 2, 3), vacuum=9.0)
    add = atoms[8:].copy()
    add.symbols[:] = adsorbate
    add.positions[:, 2] += 1.6
    assert adsorbate_symbols(atoms + add) == adsorbate * 4


def test_an_atom_deep_in_a_hollow_is_an_adsorbate() -> None:
    """Nitrogen 0.15 Å above the four atoms of a Cu(100) hollow."""
    atoms = fcc100("Cu", (3, 3, 3), vacuum=9.0)
    add_adsorbate(atoms, "N", 0.15, "hollow")
    assert adsorbate_symbols(atoms) == "N"


def test_a_molecule_floating_above_the_slab_is_an_adsorbate() -> None:
    """Physisorbed water is bonded to nothing."""
    atoms = hcp0001("Ru", (2, 2, 4), vacuum=12.0)
    water = molecule("H2O")
    water.positions += [1.0, 1.0, atoms.positions[:, 2].max() + 3.5]
    atoms += water
    assert adsorbate_symbols(atoms) == "OHH"


def test_the_surface_is_what_lies_within_two_angstrom_of_the_top() -> None:
    """Two layers of Cu(100), 1.8 Å apart, as by OC20's height criterion, and one of Fe(110)."""
    assert tags_of(fcc100("Cu", (2, 2, 4), a=3.6, vacuum=9.0)) == [0] * 8 + [1] * 8
    assert tags_of(bcc110("Fe", (2, 2, 4), a=2.87, vacuum=9.0)) == [0] * 12 + [1] * 4


def test_notes_name_the_adsorbate_that_was_derived() -> None:
    """A reader of the result can check the judgement."""
    assert assigned(platinum(3, "CO")).notes == [
        "tags derived from the geometry: adsorbate: atoms 12, 13 (O, C); 4 surface atoms, 8 below"
    ]
    assert assigned(platinum(3)).notes == [
        "tags derived from the geometry: no adsorbate; 4 surface atoms, 8 below"
    ]


def test_heights_follow_the_open_cell_vector() -> None:
    """Up is the side of the open vector, and of +z where it is zero; the bottom atom is lowest."""
    for sign in (1.0, -1.0):
        atoms = platinum(3, "O")
        atoms.positions[:, 2] *= sign
        atoms.cell[2] *= sign
        _, frame = slab_frame(atoms.positions, atoms.cell.array, atoms.pbc)
        assert frame is not None
        assert frame.heights.argmax() == len(atoms) - 1
        atoms.cell[2] = 0.0
        _, frame = slab_frame(atoms.positions, atoms.cell.array, atoms.pbc)
        assert frame is not None
        assert frame.up.tolist() == pytest.approx([0, 0, 1])


def test_an_adsorbate_is_looked_for_on_one_side_only() -> None:
    """find_adsorbate sees the upper side: turned over, the same slab shows none."""
    atoms = platinum(3, "O")
    reach = bond_reach(atoms.numbers)
    bonds = find_bonds(atoms.numbers, find_neighbors(atoms.positions, atoms.cell.array, atoms.pbc, reach))
    assert find_adsorbate(atoms.numbers, atoms.positions[:, 2], bonds).nonzero()[0].tolist() == [12]
    assert not find_adsorbate(atoms.numbers, -atoms.positions[:, 2], bonds).any()


def test_a_slab_covered_on_both_sides_says_that_it_shows_no_adsorbate() -> None:
    """Oxygen above and below platinum: surface and below alone are derived; an oxide is no such case."""
    atoms = platinum(3, "O")
    below = atoms[atoms.numbers == 8]
    below.positions[:, 2] = 2 * atoms.positions[atoms.numbers == 78, 2].mean() - below.positions[:, 2]
    covered = assigned(atoms + below)
    assert covered.source == "derived"
    assert (covered.tags < 2).all()
    assert covered.notes[-1].startswith("O on both sides of the slab is not taken for an adsorbate")
    assert len(assigned(atoms).notes) == 1
    mixed = atoms + below
    mixed.numbers[[1, 5]] = 8
    assert len(assigned(mixed).notes) == 1
