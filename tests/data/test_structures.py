"""Structures from objects of ASE and pymatgen: what is kept, what is refused, what is stated."""

from typing import Any

import numpy as np
import pytest
import torch
from ase import Atoms
from ase.build import add_adsorbate, bulk, fcc111, molecule
from ase.calculators.singlepoint import SinglePointCalculator
from ase.constraints import FixAtoms, FixBondLength, FixCartesian

from molflt.data.structures import Structure, StructureError, structure_from_atoms, structure_from_pymatgen
from molflt.errors import InputError

SKEWED = [[4.0, 0.5, 0], [9, 5, 0], [-7, 3, -6]]


def refusal(atoms: Atoms) -> str:
    with pytest.raises(StructureError) as caught:
        structure_from_atoms(atoms, source="here", frame=3)
    return str(caught.value)


def test_fields_hold_what_the_atoms_hold() -> None:
    """Positions, cell, pbc and elements in the types of the field table; all atoms free."""
    atoms = Atoms("OHPt", [[0.1, 0.2, 0.3], [1.1, 0, 0], [-9.5, 22.0, 31.25]], cell=SKEWED, pbc=[1, 0, 1])
    data = structure_from_atoms(atoms).data
    assert data.pos.dtype == data.cell.dtype == torch.float32
    torch.testing.assert_close(data.pos, torch.tensor(atoms.positions).float(), rtol=0, atol=0)
    assert data.cell.tolist() == [SKEWED]
    assert data.pbc.tolist() == [[True, False, True]]
    assert data.atomic_numbers.tolist() == [8, 1, 78]
    assert data.atomic_numbers.dtype == torch.int64
    assert data.fixed.tolist() == [False] * 3
    assert data.natoms.tolist() == [3]
    assert "tags" not in data


@pytest.mark.parametrize("pbc", [(True, True, True), (True, True, False), (False, False, False)])
def test_nothing_is_wrapped_or_moved(pbc: tuple[bool, ...]) -> None:
    """Atoms far outside a skewed, left-handed cell stay exactly where they are, whatever the pbc."""
    pos = np.array([[40.25, -30.5, 20.125], [0, 0, 0], [-17.75, 3.5, 99.0]])
    structure = structure_from_atoms(Atoms("Cu3", pos, cell=SKEWED, pbc=pbc))
    assert np.linalg.det(np.array(SKEWED)) < 0
    assert structure.data.pos.tolist() == pos.tolist()
    assert structure.data.cell.tolist() == [SKEWED]
    assert structure.data.pbc.tolist() == [list(pbc)]


def test_formula_is_in_hill_order_and_source_and_frame_are_passed_on() -> None:
    """Carbon and hydrogen first."""
    structure = structure_from_atoms(molecule("CH3OH"), source="run 7", frame=5)
    assert (structure.formula, structure.source, structure.frame) == ("CH4O", "run 7", 5)
    assert (structure.tag_source, structure.notes, structure.reader) == ("none", [], "ASE (Atoms)")


def test_the_atoms_given_are_not_changed() -> None:
    """Reading is not a side effect."""
    atoms = fcc111("Pt", (2, 2, 3), vacuum=8)
    before = atoms.copy()
    structure_from_atoms(atoms)
    assert atoms == before


def test_tags_reach_the_data_with_their_source() -> None:
    """ASE's layers of a slab builder come out as OC20's tags."""
    atoms = fcc111("Pt", (2, 2, 4), vacuum=8)
    add_adsorbate(atoms, "O", 1.2, "fcc")
    structure = structure_from_atoms(atoms)
    assert structure.tag_source == "ase-layers"
    assert structure.data.tags.tolist() == [0] * 12 + [1] * 4 + [2]
    assert structure.data.tags.dtype == torch.int64


def test_only_fully_fixed_atoms_are_fixed() -> None:
    """FixAtoms and a full FixCartesian fix; one direction or a bond does not, and is mentioned."""
    atoms = Atoms("Cu5", np.arange(15).reshape(5, 3) * 2.0)
    atoms.set_constraint(
        [
            FixAtoms([1]),
            FixCartesian([2], mask=(True, True, True)),
            FixCartesian([3], mask=(False, False, True)),
            FixBondLength(0, 4),
        ]
    )
    structure = structure_from_atoms(atoms)
    assert structure.data.fixed.tolist() == [False, True, True, False, False]
    assert structure.notes == [
        "constraints that do not fix an atom fully are ignored: FixBondLengths, FixCartesian"
    ]


def test_an_energy_in_a_calculator_is_no_label() -> None:
    """It is neither a field nor used, and the notes say that it was there."""
    atoms = molecule("H2O")
    atoms.calc = SinglePointCalculator(atoms, energy=-14.25)
    structure = structure_from_atoms(atoms)
    assert not {"y_relaxed", "y_init", "energy", "y"} & set(structure.data.keys())
    assert structure.notes == ["the energy in the file (-14.25 eV) is not used: its reference is unknown"]


def test_a_calculator_is_not_run() -> None:
    """A calculator without results is left alone."""

    class Costly(SinglePointCalculator):
        def get_property(self, *args: Any, **kwargs: Any) -> Any:
            raise AssertionError("was run")

    atoms = molecule("H2O")
    atoms.calc = Costly(atoms)
    assert structure_from_atoms(atoms).notes == []


def test_refusals_name_source_frame_and_reason_in_one_line() -> None:
    """They are InputErrors whose parts can be read one by one."""
    with pytest.raises(InputError) as caught:
        structure_from_atoms(Atoms(), source="a file.xyz", frame=2)
    error = caught.value
    assert isinstance(error, StructureError)
    assert (error.source, error.frame) == ("a file.xyz", 2)
    assert str(error) == f"a file.xyz, frame 2: {error.reason}"
    assert error.reason == "holds no atoms; leave it out"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_coordinates_that_are_no_numbers_are_refused(value: float) -> None:
    """With the atom that has them."""
    atoms = Atoms("CuO", [[0, 0, 0], [0, value, 0]])
    assert refusal(atoms) == "here, frame 3: atom 1 (O) has a NaN or infinite coordinate; correct it"


def test_dummy_elements_are_refused() -> None:
    """Z = 0, which ASE reads from X and from unknown symbols of some formats."""
    atoms = Atoms("CuX", [[0, 0, 0], [0, 3, 0]])
    assert "atom 1 is a dummy or unknown element (atomic number 0)" in refusal(atoms)


@pytest.mark.parametrize(
    ("atoms", "message"),
    [
        (Atoms("H2", [[0, 0, 0], [0, 0, 0.49]]), "atom 0 (H) and atom 1 (H) are 0.49 Å apart"),
        (
            Atoms("OC", [[0, 0, 0.1], [0, 0, 9.8]], cell=[10, 10, 10], pbc=True),
            "atom 0 (O) and atom 1 (C) of a periodic image are 0.30 Å apart",
        ),
        (
            Atoms("H", [[0, 0, 0]], cell=[[4, 0, 0], [4, 0.4, 0], [0, 0, 4]], pbc=True),
            "atom 0 (H) and atom 0 (H) of a periodic image are 0.40 Å apart",
        ),
        (Atoms("Cu2", [[1, 2, 3], [1, 2, 3]]), "are 0.00 Å apart"),
    ],
)
def test_overlapping_atoms_are_refused(atoms: Atoms, message: str) -> None:
    """Closer than 0.5 Å, duplicates and images included, with both atoms and their distance."""
    assert message in refusal(atoms)


def test_atoms_half_an_angstrom_apart_are_accepted() -> None:
    """The limit refuses less than 0.5 Å, and images only along periodic directions."""
    assert structure_from_atoms(Atoms("H2", [[0, 0, 0], [0, 0, 0.51]])).formula == "H2"
    open_box = Atoms("OC", [[0, 0, 0.1], [0, 0, 9.8]], cell=[10, 10, 10], pbc=[True, True, False])
    assert structure_from_atoms(open_box).formula == "CO"


@pytest.mark.parametrize(
    ("cell", "pbc", "message"),
    [
        ([0, 0, 0], [True, True, True], "cell vector a has zero length but pbc is on"),
        ([4, 4, 0], [True, True, True], "cell vector c has zero length but pbc is on"),
        ([[4, 0, 0], [8, 0, 0], [0, 0, 4]], [True, True, False], "a, b are linearly dependent"),
        ([[4, 0, 0], [0, 4, 0], [4, 4, 0]], [True, True, True], "a, b, c are linearly dependent"),
        ([[4, 0, 0], [0, float("nan"), 0], [0, 0, 4]], [True, True, True], "cell holds NaN"),
    ],
)
def test_cells_that_cannot_repeat_are_refused(cell: list, pbc: list, message: str) -> None:
    """Zero, dependent and undefined vectors along periodic directions."""
    assert message in refusal(Atoms("Cu", cell=cell, pbc=pbc))


def test_zero_vectors_along_open_directions_are_fine() -> None:
    """TTF with a zero third vector is how ASE writes slabs without vacuum."""
    atoms = Atoms("Cu", cell=[3, 3, 0], pbc=[True, True, False])
    assert structure_from_atoms(atoms).data.cell[0, 2].tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("pos", "lengths", "pbc", "message"),
    [
        (1e39, (9, 9, 9), (1, 1, 1), "too far for single precision"),
        (0, (1e39, 9, 9), (1, 1, 1), "cell holds NaN or infinite numbers"),
        (0, (9, 9, 1e39), (1, 1, 0), "cell holds NaN or infinite numbers"),
        (0, (9, float("nan"), 9), (1, 1, 1), "cell holds NaN or infinite numbers"),
        (0, (9, 2e6, 9), (1, 1, 1), "cell vector b is 2e+06 Å long"),
    ],
)
def test_what_single_precision_does_not_hold_is_refused(
    pos: float, lengths: tuple[float, ...], pbc: tuple[int, ...], message: str
) -> None:
    """Without a warning of numpy's."""
    assert message in refusal(Atoms("Cu", [[pos, 0, 0]], cell=lengths, pbc=pbc))


def test_positions_beyond_single_precision_are_refused() -> None:
    """At 10⁶ Å float32 would move an atom by 0.03 Å; at 1,000 Å it does not by more than 10⁻³ Å."""
    assert "too far for single precision" in refusal(Atoms("Cu", [[1e6 + 0.03, 0, 0]]))
    assert structure_from_atoms(Atoms("Cu", [[1000.03, 0, 0]])).data.pos[0, 0].item() == np.float32(1000.03)


@pytest.mark.parametrize("name", ["occupancy", "occupancies"])
def test_occupancy_columns_are_checked(name: str) -> None:
    """ASE carries such arrays along (PDB, extxyz, muSTEM) without acting on them."""
    atoms = bulk("NaCl", "rocksalt", 5.6)
    atoms.set_array(name, np.array([1.0, 1.0]))
    assert structure_from_atoms(atoms).formula == "ClNa"
    atoms.arrays[name][1] = 0.75
    assert "atom 1 (Cl) has occupancy 0.75: a disordered site" in refusal(atoms)


@pytest.mark.parametrize("species", [{"Fe": 0.5, "Ni": 0.5}, {"Fe": 0.9}])
def test_occupancies_in_info_are_checked(species: dict[str, float]) -> None:
    """ASE's own CIF reader leaves the majority element and the shares in info."""
    atoms = bulk("Fe")
    atoms.info["occupancy"] = {"0": species}
    assert "site 0 (Fe" in refusal(atoms)
    atoms.info["occupancy"] = {"0": {"Fe": 1.0}}
    assert structure_from_atoms(atoms).formula == "Fe"


def pymatgen_structure(species: list, **properties: list) -> Any:
    from pymatgen.core import Lattice
    from pymatgen.core import Structure as PymatgenStructure

    coordinates = [[0, 0, 0], [1.5, 0.5, -0.5]][: len(species)]
    return PymatgenStructure(Lattice(SKEWED), species, coordinates, site_properties=properties)


def test_pymatgen_structures_keep_positions_and_cell() -> None:
    """Fractional coordinates outside the cell, oxidation states, selective dynamics."""
    obj = pymatgen_structure(["Na+", "Cl-"], selective_dynamics=[[False] * 3, [True, False, False]])
    structure = structure_from_pymatgen(obj, source="obj", frame=1)
    assert isinstance(structure, Structure)
    expected = np.array([1.5, 0.5, -0.5]) @ np.array(SKEWED)
    torch.testing.assert_close(structure.data.pos[1].double(), torch.tensor(expected), rtol=0, atol=1e-5)
    assert structure.data.cell.tolist() == [SKEWED]
    assert structure.data.pbc.tolist() == [[True] * 3]
    assert structure.data.atomic_numbers.tolist() == [11, 17]
    assert structure.data.fixed.tolist() == [True, False]
    assert (structure.formula, structure.reader) == ("ClNa", "pymatgen (Structure)")


def test_pymatgen_molecules_are_open() -> None:
    """A Molecule has no lattice."""
    from pymatgen.core import Molecule

    structure = structure_from_pymatgen(Molecule(["O", "C"], [[0, 0, 0], [0, 0, 1.15]]))
    assert structure.data.pbc.tolist() == [[False] * 3]
    assert structure.data.cell.tolist() == [[[0.0] * 3] * 3]
    assert structure.data.pos[1].tolist() == [0, 0, pytest.approx(1.15)]


def test_pymatgen_tags_are_read() -> None:
    """As a site property, which is how ASE's tags travel through pymatgen's adaptor."""
    from pymatgen.io.ase import AseAtomsAdaptor

    atoms = fcc111("Pt", (2, 2, 3), vacuum=8)
    atoms.pbc = True
    structure = structure_from_pymatgen(AseAtomsAdaptor.get_structure(atoms))
    assert structure.tag_source == "ase-layers"
    assert structure.data.tags.tolist() == [0] * 8 + [1] * 4


@pytest.mark.parametrize(
    ("species", "message"),
    [
        ([{"Fe": 0.5, "Ni": 0.5}, "O"], "site 0 (Fe:0.5, Ni:0.5) is shared by several species"),
        (["Fe", {"O": 0.8}], "site 1 (O) has occupancy 0.8"),
    ],
)
def test_disordered_pymatgen_structures_are_refused(species: list, message: str) -> None:
    """Several species on a site, or a site that is partly empty."""
    with pytest.raises(StructureError) as caught:
        structure_from_pymatgen(pymatgen_structure(species))
    assert message in str(caught.value)


def test_dummy_species_of_pymatgen_are_refused() -> None:
    """X0+ is no element."""
    from pymatgen.core import DummySpecies

    with pytest.raises(StructureError, match="site 1 holds the dummy species X"):
        structure_from_pymatgen(pymatgen_structure(["Fe", DummySpecies("X")]))


def test_deuterium_of_pymatgen_is_hydrogen_with_a_note() -> None:
    """The isotope has the chemistry of hydrogen, and the notes count it."""
    structure = structure_from_pymatgen(pymatgen_structure(["D", "O"]))
    assert structure.data.atomic_numbers.tolist() == [1, 8]
    assert structure.notes == ["deuterium (D, 1 atoms) is computed as hydrogen"]
