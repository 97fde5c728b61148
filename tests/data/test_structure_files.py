"""Structure files: formats, names, compression, frames, and the traps that readers step over."""

import bz2
import gzip
import itertools
import lzma
import subprocess
import sys
import warnings
from pathlib import Path

import ase.io
import numpy as np
import pytest
import torch
from ase import Atoms
from ase.build import add_adsorbate, bulk, fcc111, molecule
from ase.calculators.singlepoint import SinglePointCalculator
from ase.constraints import FixAtoms
from torch_geometric.data import Data

from molflt.data import pymatgen_io
from molflt.data.structures import (
    Structure,
    StructureError,
    iter_structures,
    read_structures,
    structure_from_atoms,
)
from molflt.data.xyz import iter_xyz

STRUCTURES = Path(__file__).parents[2] / "datasets" / "fcc111" / "structures"


def slab(pbc: bool = True) -> Atoms:
    """Pt(111) 2 x 2 x 4 with oxygen, periodic, ASE's layer tags, two bottom layers fixed."""
    atoms = fcc111("Pt", (2, 2, 4), vacuum=8)
    add_adsorbate(atoms, "O", 1.2, "fcc")
    atoms.info.clear()
    atoms.pbc = pbc
    atoms.set_constraint(FixAtoms(range(8)))
    return atoms


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def refusal(path: Path) -> str:
    """The reason why the only frame of a file is refused, checked to be one line that names the file."""
    with pytest.raises(StructureError) as caught:
        read_structures(path)
    message = str(caught.value)
    assert message.startswith(str(path))
    assert "\n" not in message
    return caught.value.reason


def as_atoms(data: Data) -> Atoms:
    numbers, pos, cell, pbc = (data[name].numpy() for name in ("atomic_numbers", "pos", "cell", "pbc"))
    return Atoms(numbers, pos, cell=cell[0], pbc=pbc[0])


def assert_same_geometry(structure: Structure, atoms: Atoms, tolerance: float) -> None:
    """Equal elements, and all distances, images included, within the file's precision."""
    data = structure.data
    assert data.atomic_numbers.tolist() == atoms.numbers.tolist()
    read = as_atoms(data)
    if atoms.pbc.any():
        np.testing.assert_allclose(read.cell.cellpar(), atoms.cell.cellpar(), atol=tolerance)
    np.testing.assert_allclose(
        read.get_all_distances(mic=bool(atoms.pbc.any())),
        atoms.get_all_distances(mic=bool(atoms.pbc.any())),
        atol=tolerance,
    )


@pytest.mark.parametrize(
    ("name", "format", "reader"),
    [
        ("a.extxyz", "extxyz", "ASE (extxyz)"),
        ("a.xyz", "extxyz", "ASE (extxyz)"),
        ("a.cif", "cif", "pymatgen (cif)"),
        ("POSCAR", "vasp", "ASE (vasp)"),
        ("a.vasp", "vasp", "ASE (vasp)"),
        ("XDATCAR", "vasp-xdatcar", "ASE (vasp-xdatcar)"),
        ("a.traj", "traj", "ASE (traj)"),
        ("a.json", "json", "ASE (json)"),
        ("a.db", "db", "ASE (db)"),
        ("a.xsf", "xsf", "ASE (xsf)"),
        ("a.gen", "gen", "ASE (gen)"),
        ("a.pdb", "proteindatabank", "ASE (proteindatabank)"),
        ("a.res", "res", "ASE (res)"),
        ("a.cfg", "cfg", "ASE (cfg)"),
        ("a.cube", "cube", "ASE (cube)"),
    ],
)
def test_formats_of_ase_are_read(tmp_path: Path, name: str, format: str, reader: str) -> None:
    """The slab comes back with its geometry, its derived or given tags, and the reader's name."""
    atoms = slab()
    ase.io.write(tmp_path / name, atoms, format=format)
    [structure] = read_structures(tmp_path / name)
    assert_same_geometry(structure, atoms, 2e-3)
    assert structure.reader == reader
    assert structure.data.pbc.tolist() == [[True] * 3]
    assert structure.data.tags.tolist() == [0] * 12 + [1] * 4 + [2]
    assert structure.tag_source in ("derived", "ase-layers")


@pytest.mark.parametrize(
    ("name", "format", "tag_source"),
    [("a.extxyz", "extxyz", "ase-layers"), ("a.traj", "traj", "ase-layers"), ("POSCAR", "vasp", "derived")],
)
def test_tags_and_fixed_atoms_come_with_formats_that_hold_them(
    tmp_path: Path, name: str, format: str, tag_source: str
) -> None:
    """Extended XYZ and trajectories keep tags and constraints, a POSCAR only constraints."""
    atoms = slab()
    columns = {"columns": ["symbols", "positions", "tags", "move_mask"]} if format == "extxyz" else {}
    ase.io.write(tmp_path / name, atoms, format=format, **columns)
    [structure] = read_structures(tmp_path / name)
    assert structure.tag_source == tag_source
    assert structure.data.fixed.tolist() == [True] * 8 + [False] * 9


def test_oc20_tags_in_a_file_are_given_tags(tmp_path: Path) -> None:
    """The four layers of tags 0, 0, 0, 1 and adsorbate 2 are read as they stand."""
    atoms = slab()
    atoms.set_tags([0] * 12 + [1] * 4 + [2])
    ase.io.write(tmp_path / "a.extxyz", atoms)
    [structure] = read_structures(tmp_path / "a.extxyz")
    assert (structure.tag_source, structure.notes) == ("given", [])
    assert structure.data.tags.tolist() == [0] * 12 + [1] * 4 + [2]


def test_shipped_structure_files_have_the_tags_of_their_data_set() -> None:
    """Ten files in three formats: 4 surface atoms, the adsorbates of the name, given or derived."""
    sources = set()
    for path in sorted(STRUCTURES.iterdir()):
        [structure] = read_structures(path)
        metal, adsorbate, _, count = path.stem.split("-")
        tags, numbers = structure.data.tags, structure.data.atomic_numbers
        assert torch.bincount(tags).tolist() == [12, 4, int(count)]
        symbols = Atoms(numbers.numpy()).symbols
        assert set(symbols[tags.numpy() == 2]) == {adsorbate}
        assert set(symbols[tags.numpy() < 2]) == {metal}
        sources.add(structure.tag_source)
    assert sources == {"given", "derived"}


@pytest.mark.parametrize(
    "name", ["two words.xyz", "run@5.xyz", "@.xyz", "größe-表面-é.xyz", "a@0:3", "x://y.xyz", "[1].xyz"]
)
def test_a_name_is_only_a_name(tmp_path: Path, name: str) -> None:
    """Spaces, '@' (an index to ASE), brackets, '://' and letters of any language."""
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("1\n\nHe 0 0 0\n2\n\nHe 0 0 0\nHe 0 0 3\n")
    assert [s.formula for s in read_structures(path)] == ["He", "He2"]
    assert read_structures(str(path))[1].source == str(path)


@pytest.mark.parametrize("format", ["traj", "db", "cif", "vasp"])
def test_a_name_with_an_index_sign_works_for_other_readers(tmp_path: Path, format: str) -> None:
    """Also where ASE opens the file itself."""
    suffix = {"vasp": "vasp"}.get(format, format)
    ase.io.write(tmp_path / f"plain.{suffix}", slab(), format=format)
    path = (tmp_path / f"plain.{suffix}").rename(tmp_path / f"slab@1.{suffix}")
    assert read_structures(path)[0].formula == "OPt16"


@pytest.mark.parametrize(
    ("suffix", "compress"),
    [(".gz", gzip.compress), (".bz2", bz2.compress), (".xz", lzma.compress), ("", gzip.compress)],
)
@pytest.mark.parametrize(
    ("name", "format"),
    [("a.extxyz", "extxyz"), ("a.cif", "cif"), ("POSCAR", "vasp"), ("a.traj", "traj"), ("a.xsf", "xsf")],
)
def test_compressed_files_are_read(
    tmp_path: Path, name: str, format: str, suffix: str, compress: object
) -> None:
    """By their content: a missing .gz does not matter."""
    atoms = slab()
    ase.io.write(tmp_path / "plain", atoms, format=format)
    path = tmp_path / (name + suffix)
    path.write_bytes(compress((tmp_path / "plain").read_bytes()))  # type: ignore[operator]
    [structure] = read_structures(path)
    assert_same_geometry(structure, atoms, 2e-3)


@pytest.mark.parametrize(
    ("format", "misleading", "reader"),
    [
        ("vasp", "a.xyz", "ASE (vasp)"),
        ("vasp", "a.cif", "ASE (vasp)"),
        ("vasp", "a.traj", "ASE (vasp)"),
        ("cif", "POSCAR", "pymatgen (cif)"),
        ("cif", "a.xyz", "pymatgen (cif)"),
        ("cif", "data", "pymatgen (cif)"),
        ("extxyz", "CONTCAR", "ASE (extxyz)"),
        ("extxyz", "a.cif", "ASE (extxyz)"),
        ("extxyz", "a.pdb", "ASE (extxyz)"),
        ("traj", "a.xyz", "ASE (traj)"),
        ("vasp-xdatcar", "POSCAR", "ASE (vasp-xdatcar)"),
    ],
)
def test_the_content_decides_where_the_name_misleads(
    tmp_path: Path, format: str, misleading: str, reader: str
) -> None:
    """CIF, XYZ, POSCAR and ASE's trajectories are recognised under any name."""
    atoms = slab()
    ase.io.write(tmp_path / "plain", atoms, format=format)
    path = (tmp_path / "plain").rename(tmp_path / misleading)
    [structure] = read_structures(path)
    assert structure.reader == reader
    assert_same_geometry(structure, atoms, 2e-3)


@pytest.mark.parametrize(
    ("name", "format"), [("a.xyz", "extxyz"), ("a.traj", "traj"), ("a.db", "db"), ("XDATCAR", "vasp-xdatcar")]
)
def test_all_frames_are_read_in_order(tmp_path: Path, name: str, format: str) -> None:
    """Five frames, numbered, each with its own positions."""
    frames = []
    for index in range(5):
        atoms = bulk("Cu", cubic=True)
        atoms.positions[0, 0] += 0.1 * index
        frames.append(atoms)
    if format == "db":
        from ase.db import connect

        with connect(tmp_path / name) as database:
            for atoms in frames:
                database.write(atoms)
    else:
        ase.io.write(tmp_path / name, frames, format=format)
    structures = read_structures(tmp_path / name)
    assert [s.frame for s in structures] == [0, 1, 2, 3, 4]
    shifts = [float(s.data.pos[0, 0] - s.data.pos[1, 0]) for s in structures]
    assert shifts == pytest.approx([0.0, 0.1, 0.2, 0.3, 0.4], abs=1e-5)


@pytest.mark.parametrize(
    ("pbc", "lattice"),
    [
        ("T T T", "4 0.5 0 9 5 0 -7 3 -6"),
        ("T T F", "4 0.5 0 9 5 0 0 0 0"),
        ("F F F", "4 0.5 0 9 5 0 -7 3 -6"),
        ("F T F", "0 0 0 1 5 0 0 0 0"),
    ],
)
def test_cell_and_pbc_of_extended_xyz_are_kept(tmp_path: Path, pbc: str, lattice: str) -> None:
    """Triclinic, left-handed and open cells, and atoms outside of them."""
    path = write(tmp_path / "a.xyz", f'2\nLattice="{lattice}" pbc="{pbc}"\nCu 90.25 -30.5 7\nO 0 0 0\n')
    data = read_structures(path)[0].data
    assert data.pbc.tolist() == [[flag == "T" for flag in pbc.split()]]
    assert data.cell.flatten().tolist() == [float(number) for number in lattice.split()]
    assert data.pos.tolist() == [[90.25, -30.5, 7], [0, 0, 0]]


def test_a_plain_xyz_file_is_an_open_molecule(tmp_path: Path) -> None:
    """No lattice, no pbc."""
    path = write(tmp_path / "a.xyz", "3\nwater\nO 0 0 0\nH 0.96 0 0\nH 0 0.96 0\n\n\n")
    [structure] = read_structures(path)
    assert structure.data.pbc.tolist() == [[False] * 3]
    assert not structure.data.cell.any()
    assert structure.tag_source == "none"


def test_pbc_without_a_lattice_is_refused(tmp_path: Path) -> None:
    """An extended XYZ file may claim periodicity and give no cell."""
    path = write(tmp_path / "a.xyz", '1\npbc="T T T"\nCu 0 0 0\n')
    assert "cell vector a has zero length but pbc is on" in refusal(path)


XYZ_REFUSALS = {
    "0\nempty\n": "holds no atoms",
    "1\n\nX 0 0 0\n": "atom 0 has the dummy or unknown element 'X'",
    "2\n\nCu 0 0 0\nXx 0 0 3\n": "atom 1 has the dummy or unknown element 'Xx'",
    "1\n\nQq 0 0 0\n": "atom 0 has the dummy or unknown element 'Qq'",
    "1\n\nCu 0 nan 0\n": "atom 0 (Cu) has a NaN or infinite coordinate",
    "1\n\nCu 0 inf 0\n": "atom 0 (Cu) has a NaN or infinite coordinate",
    "2\n\nCu 0 0 0\nCu 0 0 0.4\n": "atom 0 (Cu) and atom 1 (Cu) are 0.40 Å apart",
    "3\n\nCu 0 0 0\nO 0 0 3\n": "declares 3 atoms but the file ends after 2",
    "1\n\nCu 0 0 0\nO 0 0 3\n": "declares 1 atoms but 'O 0 0 3' follows them",
    "2\n\nCu 0 0 0\nO 0 0\n": "cannot be read as extended XYZ",
    "1\n\nCu 0 zero 0\n": "cannot be read as extended XYZ",
    "99999999\n\nCu 0 0 0\n": "declares 99999999 atoms but the file ends after 1",
    "99999999999\n\nCu 0 0 0\n": "declares 99999999999 atoms, more than any file holds",
    "1\nProperties=species:S:1:pos:R:3:Z:I:1\nCu 0 0 0 30\n": "atom 0 has symbol Cu but atomic number 30",
    "1\nProperties=species:S:1:pos:R:3:occupancy:R:1\nCu 0 0 0 0.5\n": "atom 0 (Cu) has occupancy 0.5",
}


@pytest.mark.parametrize("text", XYZ_REFUSALS)
def test_xyz_files_with_a_defect_are_refused(tmp_path: Path, text: str) -> None:
    """Each with the atom and the reason, instead of a structure that is not in the file."""
    assert XYZ_REFUSALS[text] in refusal(write(tmp_path / "a.xyz", text))


def test_symbols_and_agreeing_atomic_numbers_are_accepted(tmp_path: Path) -> None:
    """Both columns may be there, in any order."""
    text = "2\nProperties=Z:I:1:species:S:1:pos:R:3\n29 Cu 0 0 0\n8 O 0 0 2\n"
    assert read_structures(write(tmp_path / "a.xyz", text))[0].formula == "CuO"


def test_bad_frames_do_not_end_the_file(tmp_path: Path) -> None:
    """A refusal stands in the place of each, with its frame number; the rest is read."""
    good, dummy, close = "1\n\nHe 0 0 0\n", "1\n\nX 0 0 0\n", "2\n\nHe 0 0 0\nHe 0 0 0.1\n"
    path = write(tmp_path / "a.xyz", good + dummy + good + close + good)
    items = list(iter_structures(path))
    assert [isinstance(item, Structure) for item in items] == [True, False, True, False, True]
    assert [item.frame for item in items] == [0, 1, 2, 3, 4]
    assert str(items[1]).startswith(f"{path}, frame 1: atom 0 has the dummy")
    with pytest.raises(StructureError, match="frame 1"):
        read_structures(path)


def test_a_file_that_breaks_off_keeps_what_came_before(tmp_path: Path) -> None:
    """The frames before are yielded, then one refusal for the rest."""
    path = write(tmp_path / "a.xyz", "1\n\nHe 0 0 0\n1\n\nNe 0 0 0\n5\n\nAr 0 0 0\n")
    items = list(iter_structures(path))
    assert [item.formula if isinstance(item, Structure) else "-" for item in items] == ["He", "Ne", "-"]
    assert "declares 5 atoms but the file ends after 1" in str(items[2])


def test_deuterium_and_tritium_are_hydrogen_with_a_note(tmp_path: Path) -> None:
    """In XYZ, POSCAR and CIF, where ASE stops or guesses."""
    xyz = write(tmp_path / "a.xyz", "3\n\nO 0 0 0\nD 0.96 0 0\nT 0 0.96 0\n")
    poscar = write(
        tmp_path / "POSCAR", "x\n1\n9 0 0\n0 9 0\n0 0 9\nO D T\n1 1 1\nC\n0 0 0\n.96 0 0\n0 .96 0\n"
    )
    cif = write(tmp_path / "a.cif", cif_text("O1 O 0 0 0 1\nD1 D 0.24 0 0 1\nT1 T 0 0.24 0 1"))
    for path in (xyz, poscar, cif):
        [structure] = read_structures(path)
        assert structure.data.atomic_numbers.tolist() == [8, 1, 1]
        assert structure.notes == [
            "deuterium (D, 1 atoms) is computed as hydrogen",
            "tritium (T, 1 atoms) is computed as hydrogen",
        ]


def poscar(
    comment: str = "slab",
    elements: str = "Cu O",
    counts: str = "1 1",
    positions: str = "0 0 0\n0.5 0.5 0.5\n",
    third: str = "0 0 4",
) -> str:
    return f"{comment}\n1.0\n4 0 0\n0 4 0\n{third}\n{elements}\n{counts}\nDirect\n{positions}"


def test_the_comment_of_a_poscar_names_no_elements(tmp_path: Path) -> None:
    """'Fe Ni' in the comment is a comment; elements are those before the counts."""
    [structure] = read_structures(write(tmp_path / "POSCAR", poscar(comment="Fe Ni")))
    assert structure.data.atomic_numbers.tolist() == [29, 8]
    assert structure.data.pos[1].tolist() == [2, 2, 2]


def test_pseudopotential_suffixes_and_further_sections_of_a_poscar_are_passed_over(tmp_path: Path) -> None:
    """Cu_pv/1a2b is copper; velocities or a charge density after the positions are not structure."""
    text = (
        poscar(elements="Cu_pv/1a2b O_s ! from POTCAR")
        + "\n 0.1 0.2 0.3\n 0 0 0\n\n 12 12 12\n 0.123 0.456\n"
    )
    assert read_structures(write(tmp_path / "CHGCAR", text))[0].formula == "CuO"


POSCAR_REFUSALS = {
    poscar(elements="1 1", counts="Direct"): "is in VASP 4's format, which does not name the elements",
    poscar(elements="Cu O H"): "names the elements 'Cu O H' but counts '1 1'",
    poscar(elements="Cu X"): "names the dummy or unknown element 'X'",
    poscar(elements="Cu Qq"): "names the dummy or unknown element 'Qq'",
    poscar(counts="1 2"): "counts 3 atoms but lists 2 positions",
    poscar(counts="9999999999 1"): "counts 10000000000 atoms but lists 2 positions",
    poscar(counts="0 0"): "holds no atoms",
    poscar(positions="0 0 0\n0 0 0.05\n"): "are 0.20 Å apart",
    poscar(positions="0 0 0\n0 0 0.99\n"): "atom 0 (Cu) and atom 1 (O) of a periodic image are 0.04 Å apart",
    poscar(positions="0 0 0\n0 nan 0.5\n"): "atom 1 (O) has a NaN",
    poscar(third="0 0 0"): "cell vector c has zero length",
    poscar(third="4 4 0"): "linearly dependent",
}


@pytest.mark.parametrize("text", POSCAR_REFUSALS)
def test_poscar_files_with_a_defect_are_refused(tmp_path: Path, text: str) -> None:
    """Missing or disagreeing elements, counts and positions, overlaps, impossible cells."""
    assert POSCAR_REFUSALS[text] in refusal(write(tmp_path / "POSCAR", text))


def test_a_potcar_nearby_is_not_consulted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ASE would take the elements of a VASP 4 file from a POTCAR in the working directory."""
    write(tmp_path / "POTCAR", "  TITEL  = PAW_PBE Pt 01Jan2000\n  TITEL  = PAW_PBE O 01Jan2000\n")
    path = write(tmp_path / "POSCAR", poscar(comment="Pt O", elements="1 1", counts="Direct"))
    monkeypatch.chdir(tmp_path)
    assert "VASP 4" in refusal(path)


def cif_text(sites: str, header: str = "", length_c: str = "4.0", group: str = "P 1", number: int = 1) -> str:
    return f"""data_test
_cell_length_a 4.0
_cell_length_b 4.0
_cell_length_c {length_c}
_cell_angle_alpha 90
_cell_angle_beta 90
_cell_angle_gamma 90
_symmetry_space_group_name_H-M '{group}'
_symmetry_Int_Tables_number {number}
{header}
loop_
_atom_site_label
_atom_site_type_symbol
_atom_site_fract_x
_atom_site_fract_y
_atom_site_fract_z
_atom_site_occupancy
{sites}
"""


def test_cif_keeps_order_and_positions_of_the_file(tmp_path: Path) -> None:
    """pymatgen would sort by electronegativity and wrap; here O stays first and outside the cell."""
    path = write(tmp_path / "a.cif", cif_text("O1 O2- -0.50000(3) 0.25 1.75 .\nFe1 Fe2+ 1.25 0 0 1.0"))
    [structure] = read_structures(path)
    assert structure.data.atomic_numbers.tolist() == [8, 26]
    assert structure.data.pos.tolist() == [[-2, 1, 7], [5, 0, 0]]
    assert (structure.notes, structure.reader) == ([], "pymatgen (cif)")


def test_cif_puts_a_along_x_and_b_into_the_xy_plane(tmp_path: Path) -> None:
    """The cell's orientation, which CIF leaves open, is OC20's; a slab stands along z."""
    atoms = slab()
    ase.io.write(tmp_path / "a.cif", atoms)
    cell = read_structures(tmp_path / "a.cif")[0].data.cell[0]
    torch.testing.assert_close(cell, torch.tensor(atoms.cell.array).float(), rtol=0, atol=1e-4)


def test_cif_symmetry_is_expanded_with_a_note(tmp_path: Path) -> None:
    """Rock salt from two sites: eight atoms, each with six neighbours at a/2."""
    path = write(
        tmp_path / "a.cif", cif_text("Na1 Na 0 0 0 1\nCl1 Cl 0.5 0.5 0.5 1", group="F m -3 m", number=225)
    )
    [structure] = read_structures(path)
    assert structure.formula == "Cl4Na4"
    assert structure.notes == ["the 2 sites of the file are 8 atoms by symmetry"]
    distances = as_atoms(structure.data).get_all_distances(mic=True)
    assert (np.abs(distances - 2.0) < 1e-5).sum(1).tolist() == [3] * 8  # two images each


IDENTITY = "loop_\n_space_group_symop_operation_xyz\n'x, y, z'"
TWO_SITES = "O1 O -0.5(1) 0.25 1.75 .\nFe1 Fe 1.25 0 0 1.0"


def test_what_a_plain_cif_lists_is_what_pymatgen_makes_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With no other symmetry than the identity, pymatgen's expansion is left out, and nothing differs."""
    atoms = slab()
    atoms.wrap()
    ase.io.write(tmp_path / "slab.cif", atoms)
    write(tmp_path / "sites.cif", cif_text(TWO_SITES, IDENTITY + "\n_chemical_formula_sum 'Fe2 O2'"))
    paths = [tmp_path / "slab.cif", tmp_path / "sites.cif"]
    expected = [read_with_pymatgen(path, monkeypatch) for path in paths]

    def unexpected(*arguments: object) -> None:
        raise AssertionError("pymatgen expanded a file whose only operation is the identity")

    monkeypatch.setattr(pymatgen_io, "_expanded", unexpected)
    for path, slow in zip(paths, expected, strict=True):
        [structure] = read_structures(path)
        assert (structure.formula, structure.notes) == (slow.formula, slow.notes)
        torch.testing.assert_close(structure.data.pos, slow.data.pos, rtol=0, atol=0)
        assert structure.data.atomic_numbers.tolist() == slow.data.atomic_numbers.tolist()


def read_with_pymatgen(path: Path, monkeypatch: pytest.MonkeyPatch) -> Structure:
    with monkeypatch.context() as patched:
        patched.setattr(pymatgen_io, "_lists_every_atom", lambda *_: False)
        [structure] = read_structures(path)
    return structure


@pytest.mark.parametrize(
    ("sites", "header", "expected"),
    [
        (TWO_SITES, "_symmetry_equiv_pos_as_xyz 'x, y, z'", "1-line symmetry op"),
        (TWO_SITES, IDENTITY + "\n'-x, -y, -z'", "2 sites of the file are 4 atoms"),
        (TWO_SITES, IDENTITY + "\n_atom_site_attached_hydrogens 2", "implicit hydrogens"),
        (TWO_SITES, IDENTITY + "\n_chemical_formula_sum 'Fe2 O3'", "states the formula Fe2 O3"),
        (TWO_SITES, IDENTITY + "\n_chemical_formula_sum 'Fe O H'", "states the formula Fe O H"),
        (TWO_SITES, IDENTITY + "\n_chemical_formula_sum 'Fe0 O0'", "states the formula Fe0 O0"),
        (TWO_SITES, IDENTITY + "\n_chemical_formula_sum 'rust (2)x'", "states the formula rust"),
        (TWO_SITES, IDENTITY + "\nloop_\n_chemical_formula_sum\n'Fe O'", "cannot be read as CIF"),
        ("D1 D 0 0 0 1\nFe1 Fe 0.5 0.5 0 1", IDENTITY, "deuterium"),
    ],
)
def test_a_cif_that_says_more_than_its_sites_is_read_by_pymatgen(
    tmp_path: Path, sites: str, header: str, expected: str
) -> None:
    """Symmetry, hydrogens that are not listed, a formula that does not fit, isotopes."""
    [outcome] = iter_structures(write(tmp_path / "a.cif", cif_text(sites, header)))
    said = str(outcome) if isinstance(outcome, StructureError) else "; ".join(outcome.notes)
    assert expected in said


def test_all_structures_of_a_cif_are_read(tmp_path: Path) -> None:
    """Blocks with the same name do not overwrite each other, and a block without sites is none."""
    one, two = cif_text("Na1 Na 0 0 0 1"), cif_text("K1 K 0 0 0 1")
    path = write(tmp_path / "a.cif", "data_global\n_journal_name_full 'J. Test'\n" + one + two)
    assert [(s.frame, s.formula) for s in read_structures(path)] == [(0, "Na"), (1, "K")]


CIF_REFUSALS = {
    cif_text("Fe1 Fe 0 0 0 0.5\nFe2 Fe 0.5 0.5 0.5 1"): "site Fe1 has occupancy 0.5",
    cif_text("Fe1 Fe 0 0 0 1\nO1 O 0.5 0.5 0.5 0"): "site O1 has occupancy 0",
    cif_text("Fe1 Fe 0 0 0 0.5\nNi1 Ni 0 0 0 0.5"): "site Fe1 has occupancy 0.5",
    cif_text("Fe1 Fe 0 0 0 1\nX1 X 0.5 0.5 0.5 1"): "site X1 has the dummy or unknown element 'X'",
    cif_text("Fe1 Fe 0 0 0 1\nQ1 Qq 0.5 0.5 0.5 1"): "site Q1 has the dummy or unknown element 'Qq'",
    cif_text("Fe1 Fe 0 0 0 1\nO1 OH 0.5 0.5 0.5 1"): "site O1 has the dummy or unknown element 'OH'",
    cif_text("Fe1 Fe 0 0 0 1\nFe2 Fe 0 0 0 1"): "atom 0 (Fe) and atom 1 (Fe) are 0.00 Å apart",
    cif_text("Fe1 Fe 0 0 0.02 1\nFe2 Fe 0 0 0.95 1"): "of a periodic image are 0.28 Å apart",
    cif_text("Fe1 Fe ? 0 0 1"): "has the coordinate '?', which is no number",
    cif_text("Fe1 Fe . 0 0 1"): "has the coordinate '.', which is no number",
    cif_text("Fe1 Fe nan 0 0 1"): "atom 0 (Fe) has a NaN",
    cif_text("Fe1 Fe 0 0 0 1", length_c="0"): "cell vector c has zero length",
    cif_text("Fe1 Fe 0 0 0 1").replace("alpha 90", "alpha 0"): "correct the cell",
    cif_text("Fe1 Fe 0 0 0 1\nO1 O 0.5 0 0 1", "_chemical_formula_sum 'Fe2 O3'"): "states the formula Fe2 O3",
    cif_text("Fe1 Fe 0 0 0 1", "_chemical_formula_sum 'Fe H2'"): "states the formula Fe H2",
    cif_text("Fe1 Fe 0 0 0 1").replace(
        "_atom_site_fract_x", "_atom_site_Cartn_x"
    ): "has no _atom_site_fract_x",
}


@pytest.mark.parametrize("text", CIF_REFUSALS)
def test_cif_files_with_a_defect_are_refused(tmp_path: Path, text: str) -> None:
    """Disorder, dummies, duplicates (which pymatgen merges), missing numbers, formula of something else."""
    assert CIF_REFUSALS[text] in refusal(write(tmp_path / "a.cif", text))


def test_a_cif_formula_that_agrees_is_accepted(tmp_path: Path) -> None:
    """Up to a common factor, as CIF states one formula unit."""
    sites = "Fe1 Fe 0 0 0 1\nO1 O 0.5 0 0 1\nFe2 Fe 0 0.5 0.5 1\nO2 O 0.5 0.5 0.5 1"
    path = write(tmp_path / "a.cif", cif_text(sites, "_chemical_formula_sum 'Fe O'"))
    assert read_structures(path)[0].formula == "Fe2O2"


def test_elements_taken_from_labels_are_stated(tmp_path: Path) -> None:
    """Without type symbols the label is all there is: Ow is read as oxygen, and the notes say so."""
    text = cif_text("Na1 0 0 0 1\nOw 0.5 0.5 0.5 1").replace("_atom_site_type_symbol\n", "")
    [structure] = read_structures(write(tmp_path / "a.cif", text))
    assert structure.data.atomic_numbers.tolist() == [11, 8]
    assert structure.notes == ["pymatgen: Ow parsed as O"]


def test_partial_occupancy_in_pdb_is_refused(tmp_path: Path) -> None:
    """ASE reads the column and builds whole atoms."""
    ase.io.write(tmp_path / "a.pdb", bulk("NaCl", "rocksalt", 5.6, cubic=True))
    text = (tmp_path / "a.pdb").read_text()
    assert "  1.00  0.00" in text
    path = write(tmp_path / "b.pdb", text.replace("  1.00  0.00", "  0.50  0.00", 1))
    assert "atom 0 (Na) has occupancy 0.5" in refusal(path)


def test_partial_occupancy_and_symmetry_in_shelx_files_are_refused(tmp_path: Path) -> None:
    """ASE drops the one and does not apply the other."""
    ase.io.write(tmp_path / "a.res", bulk("NaCl", "rocksalt", 5.6, cubic=True))
    text = (tmp_path / "a.res").read_text()
    partial = write(tmp_path / "b.res", text.replace("0.000000 1.0", "0.000000 10.5", 1))
    assert "site Na has occupancy 0.5" in refusal(partial)
    fixed = write(tmp_path / "c.res", text.replace("0.000000 1.0", "0.000000 11.0"))
    assert read_structures(fixed)[0].formula == "Cl4Na4"
    for line in ("LATT 1", "LATT -1\nSYMM -X,-Y,Z"):
        symmetric = write(tmp_path / "d.res", text.replace("LATT -1", line))
        assert "its symmetry multiplies" in refusal(symmetric)


def test_an_energy_in_a_file_is_no_label(tmp_path: Path) -> None:
    """Extended XYZ turns the key energy into a calculator: it is stated and not used."""
    atoms = molecule("H2O")
    atoms.calc = SinglePointCalculator(atoms, energy=-14.25, forces=np.zeros((3, 3)))
    ase.io.write(tmp_path / "a.xyz", atoms)
    [structure] = read_structures(tmp_path / "a.xyz")
    assert set(structure.data.keys()) == {"pos", "cell", "pbc", "atomic_numbers", "fixed", "natoms"}
    assert structure.notes == ["the energy in the file (-14.25 eV) is not used: its reference is unknown"]


@pytest.mark.parametrize(("cell", "pbc", "noted"), [(9, False, True), (9, True, False), (0, False, False)])
def test_a_cell_that_does_not_repeat_is_noted(cell: float, pbc: bool, noted: bool) -> None:
    """It may be a box around a molecule, or a slab whose pbc was lost."""
    notes = structure_from_atoms(Atoms("He", cell=[cell] * 3, pbc=pbc)).notes
    assert (
        notes
        == ["pbc is off in all directions: the cell is not used, and the structure is a molecule"] * noted
    )


def test_warnings_of_a_reader_become_notes(tmp_path: Path) -> None:
    """They reach whoever reads the result, and not the terminal."""
    text = '1\nkey="a" key="b"\nCu 0 0 0\n'
    path = write(
        tmp_path / "a.pdb", "ATOM      1  CU  MOL A   1       0.000   0.000   0.000 -1.00  0.00          CU\n"
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        items = list(iter_structures(path)) + list(iter_structures(write(tmp_path / "a.xyz", text)))
    assert isinstance(items[0], StructureError)
    assert "has occupancy -1" in items[0].reason
    assert isinstance(items[1], Structure)


def altered(content: bytes) -> bytes:
    """With other bytes in the place of the 15th to the 30th."""
    return content[:14] + bytes(byte ^ 0x5A for byte in content[14:30]) + content[30:]


def test_a_file_altered_behind_its_first_bytes_is_refused_there(tmp_path: Path) -> None:
    """Frames before the damage are read; what zlib raises is no traceback."""
    frames = "".join(f"1\n{'comment ' * 200}\nHe {number} 0 0\n" for number in range(83)).encode()
    # A second member, whose first block is of no type there is.
    (tmp_path / "a.xyz.gz").write_bytes(gzip.compress(frames) + gzip.compress(b"")[:10] + b"\xff" * 30)
    items = list(iter_structures(tmp_path / "a.xyz.gz"))
    assert len(items) > 80
    assert all(isinstance(item, Structure) for item in items[:-1])
    assert "is damaged (error: Error -3" in str(items[-1])


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("missing.xyz", None, "does not exist; check the name"),
        ("empty.cif", b"", "is empty"),
        ("blank.xyz", b"  \n\n \n", "is empty"),
        ("words.txt", b"hello\nworld\n", "has no structure format known by content or name"),
        ("noise.bin", bytes(range(256)) * 9, "has no structure format known by content or name"),
        ("half.xyz.gz", gzip.compress(b"1\n\nHe 0 0 0\n" * 99)[:25], "is damaged (EOFError"),
        ("altered.gz", altered(gzip.compress(bytes(range(256)) * 9)), "is damaged (error: Error -3"),
        ("altered.xz", altered(lzma.compress(bytes(range(256)) * 9)), "is damaged (LZMAError"),
        ("altered.bz2", altered(bz2.compress(bytes(range(256)) * 9)), "cannot be opened (OSError"),
        ("half.traj", b"- of UlmASE-Trajectory", "cannot be read as traj"),
        ("words.cif", b"data_x\n_cell_length_a 4\n", "holds no CIF data block with atom sites"),
        ("pickle.pkl", b"\x80\x04\x95\x00\x00\x00\x00", "has no structure format known by content or name"),
    ],
)
def test_files_that_hold_no_structure_are_refused(
    tmp_path: Path, name: str, content: bytes | None, message: str
) -> None:
    """Missing, empty, foreign and truncated files, each with what to do."""
    if content is not None:
        (tmp_path / name).write_bytes(content)
    assert message in refusal(tmp_path / name)


def test_a_folder_is_no_structure_file(tmp_path: Path) -> None:
    """It is refused as such."""
    assert refusal(tmp_path) == "is not a file; give the structure files in it"


def test_a_compressed_file_that_breaks_off_later_keeps_its_frames(tmp_path: Path) -> None:
    """Damage behind the first 64 KiB ends the file with a refusal, after what could be read."""
    comments = np.random.default_rng(0).bytes(400 * 300).hex()
    text = "".join(f"1\n{comments[600 * i : 600 * (i + 1)]}\nHe {i} 0 0\n" for i in range(400))
    packed = gzip.compress(text.encode())
    (tmp_path / "a.xyz.gz").write_bytes(packed[: len(packed) * 3 // 4])
    items = list(iter_structures(tmp_path / "a.xyz.gz"))
    assert 200 < len(items) < 400
    assert all(isinstance(item, Structure) for item in items[:-1])
    assert isinstance(items[-1], StructureError)
    assert "is damaged (EOFError" in items[-1].reason


def test_pymatgen_is_imported_only_for_cif(tmp_path: Path) -> None:
    """It costs over a second, which reading XYZ should not wait for."""
    write(tmp_path / "a.xyz", "1\n\nHe 0 0 0\n")
    code = (
        "import sys, warnings; warnings.simplefilter('ignore')\n"
        "from molflt.data.structures import read_structures\n"
        f"read_structures({str(tmp_path / 'a.xyz')!r})\n"
        "print([name for name in ('pymatgen', 'matplotlib', 'lightning') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def damaged(content: bytes, generator: np.random.Generator) -> bytes:
    """Cut, flip, delete or repeat bytes at random."""
    buffer = bytearray(content)
    for _ in range(int(generator.integers(1, 5))):
        if not buffer:
            break
        kind, at = generator.integers(4), int(generator.integers(len(buffer)))
        length = int(generator.integers(1, 33))
        if kind == 0:
            del buffer[at:]
        elif kind == 1:
            buffer[at] ^= 1 << int(generator.integers(8))
        elif kind == 2:
            del buffer[at : at + length]
        else:
            buffer[at:at] = buffer[at : at + length]
    return bytes(buffer)


@pytest.mark.parametrize(
    ("name", "format"),
    [
        ("a.extxyz", "extxyz"),
        ("a.cif", "cif"),
        ("POSCAR", "vasp"),
        ("a.traj", "traj"),
        ("a.pdb", "proteindatabank"),
        ("a.xsf", "xsf"),
        ("a.json", "json"),
    ],
)
def test_damaged_files_end_in_structures_or_refusals(tmp_path: Path, name: str, format: str) -> None:
    """60 damaged copies of each: never another exception, and what is read passes the checks."""
    ase.io.write(tmp_path / name, slab(), format=format)
    content = (tmp_path / name).read_bytes()
    generator = np.random.default_rng(sum(name.encode()))
    refused = 0
    for _ in range(60):
        (tmp_path / name).write_bytes(damaged(content, generator))
        for item in iter_structures(tmp_path / name):
            if isinstance(item, StructureError):
                refused += 1
            else:
                assert item.data.pos.isfinite().all()
                assert item.data.atomic_numbers.min() >= 1
    assert refused > 5


def test_frames_are_read_when_they_are_asked_for():
    """From a stream without an end, the lines taken are those of the frames given and of one more at most."""
    taken = 0

    def lines():
        nonlocal taken
        for number in itertools.count():
            for line in ("2\n", "\n", "H 0 0 0\n", f"H 0 0 {0.7 + 1e-4 * (number % 100)}\n"):
                taken += 1
                yield line

    frames = iter_xyz(lines())
    for number in range(1, 50):
        atoms, _ = next(frames)
        assert len(atoms) == 2
        assert 4 * number <= taken <= 4 * number + 4
