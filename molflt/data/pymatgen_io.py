"""Structures by way of pymatgen: its objects, and CIF files.

CIF is read by pymatgen because it keeps site occupancies; they are checked before anything is built. pymatgen
is imported when this is needed and not before, as that takes over a second.
"""

from __future__ import annotations

import contextlib
import re
import warnings
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from ase import Atoms
from ase.constraints import FixAtoms
from ase.data import atomic_numbers, chemical_symbols
from ase.geometry import cellpar_to_cell
from numpy.typing import NDArray

from molflt.data.cells import check_cell
from molflt.data.validity import MIN_DISTANCE, check_occupancies, check_structure
from molflt.data.xyz import isotope_note, plain_symbol
from molflt.errors import InputError

if TYPE_CHECKING:
    from pymatgen.io.cif import CifBlock

_TYPE_SYMBOL = re.compile(r"([A-Za-z]{1,2})(?![A-Za-z])")
_LABEL_SYMBOL = re.compile(r"([A-Za-z]{1,2})")
_BENIGN = re.compile(r"No _symmetry_equiv_pos_as_xyz|\d+ fractional coordinates rounded")
"""What pymatgen says of a space group named without its operations, and of 1/3 rounded to itself."""
_UNSTATED = frozenset({"", ".", "?"})
_OPERATIONS = (
    "_symmetry_equiv_pos_as_xyz",
    "_symmetry_equiv_pos_as_xyz_",
    "_space_group_symop_operation_xyz",
    "_space_group_symop_operation_xyz_",
)
"""Where pymatgen looks for symmetry operations."""
_ACTED_ON = (
    "_atom_site_attached_hydrogens",
    "_atom_site_moment",
    "_atom_type_",
    "_space_group_magn",
    "_space_group_symop_magn",
)
"""What makes pymatgen do more than multiply sites."""
_SITE_TOLERANCE = 1e-4
"""Fractional; how close pymatgen takes sites for the same."""
_ELEMENTS = frozenset(chemical_symbols[1:])


def atoms_from_pymatgen(obj: Any) -> tuple[Atoms, list[str]]:
    """Convert a pymatgen Structure or Molecule to ASE atoms and notes.

    Site properties `tags` and `selective_dynamics` are kept as tags and fixed atoms. Positions and cell stay
    as they are.

    Raises:
        InputError: a site that is partly occupied, shared by several species, or holds a dummy species.
    """
    symbols = []
    for index, site in enumerate(obj):
        if len(site.species) != 1:
            raise InputError(
                f"site {index} ({site.species_string}) is shared by several species: a disordered site is no "
                "single structure; choose an ordered arrangement"
            )
        symbols.append(_symbol(site))
    check_occupancies(
        [site.species.num_atoms for site in obj], [f"site {i} ({s})" for i, s in enumerate(symbols)]
    )
    for index, symbol in enumerate(symbols):
        if plain_symbol(symbol) not in chemical_symbols[1:]:
            raise InputError(
                f"site {index} holds the dummy species {symbol}; give it a real element or remove it"
            )
    atoms = Atoms(
        [plain_symbol(symbol) for symbol in symbols], positions=np.array(obj.cart_coords).reshape(-1, 3)
    )
    lattice = getattr(obj, "lattice", None)
    if lattice is not None:
        atoms.set_cell(lattice.matrix)
        atoms.set_pbc(lattice.pbc)
    properties = obj.site_properties
    if "tags" in properties:
        atoms.set_tags(properties["tags"])
    if "selective_dynamics" in properties:
        moves = np.array(properties["selective_dynamics"], dtype=bool)
        atoms.set_constraint(FixAtoms(mask=~moves.any(axis=1)))
    return atoms, isotope_note(symbols)


def _symbol(site: Any) -> str:
    """Return the symbol of a site's only species, D and T kept apart from H."""
    species = next(iter(site.species))
    element = getattr(species, "element", species)
    return getattr(element, "value", species.symbol)


def iter_cif(text: str) -> Iterator[tuple[Atoms, list[str]] | InputError]:
    """Yield the structure of each data block of a CIF file as atoms and notes, or why it is refused.

    A CIF gives lengths and angles, not vectors: a is put along x and b into the xy plane, as in OC20. Where
    every listed site is one atom, order and positions are those of the file; where symmetry multiplies the
    sites, pymatgen expands them and a note says so.

    Raises:
        InputError: if the file cannot be parsed or holds no block with atom sites.
    """
    from pymatgen.io.cif import CifBlock

    found = False
    for block_text in re.split(r"^(?=data_)", text, flags=re.MULTILINE | re.IGNORECASE)[1:]:
        try:
            block = CifBlock.from_str(block_text)
        except Exception as error:  # malformed text raises IndexError, ValueError, ZeroDivisionError, ...
            raise InputError(f"cannot be read as CIF ({_reason(error)}); correct the file") from error
        if "_atom_site_fract_x" not in block.data and "_atom_site_label" not in block.data:
            continue
        found = True
        try:
            yield _read_block(block)
        except InputError as error:
            yield error
    if not found:
        raise InputError("holds no CIF data block with atom sites; give a file with a crystal structure")


def _read_block(block: CifBlock) -> tuple[Atoms, list[str]]:
    columns = _site_columns(block)
    names = columns["label"]
    fractional = np.array(
        [[_number(text, "coordinate") for text in columns[f"fract_{axis}"]] for axis in "xyz"]
    ).T
    symbols = _site_symbols(columns.get("type_symbol", names), names, "type_symbol" in columns)
    if "dum" in columns.get("calc_flag", []):
        raise InputError(f"site {names[columns['calc_flag'].index('dum')]} is a dummy atom; remove it")
    if "occupancy" in columns:
        shares = [1.0 if text in _UNSTATED else _number(text, "occupancy") for text in columns["occupancy"]]
        check_occupancies(shares, [f"site {name}" for name in names])
        block.data["_atom_site_occupancy"] = ["1"] * len(shares)

    cell, notes, coordinates = _cell(block), [], fractional
    if not _lists_every_atom(block, columns, cell):
        symbols, coordinates, notes = _expanded(block, symbols, fractional, cell)
    notes += isotope_note(symbols)
    return Atoms(
        [plain_symbol(symbol) for symbol in symbols], positions=coordinates @ cell, cell=cell, pbc=True
    ), notes


def _lists_every_atom(block: CifBlock, columns: dict[str, list[str]], cell: NDArray[np.float64]) -> bool:
    """Whether pymatgen would return the sites as they stand: the identity is the only symmetry, types are
    plain elements and nothing is said that it acts on or objects to. To ask it takes twice as long as all
    else that is done to read the file.
    """
    if any(part in key for key in block.data for part in _ACTED_ON):
        return False
    operations = [block.data[key] for key in _OPERATIONS if key in block.data]
    if not operations or not all(_is_identity(texts) for texts in operations):
        return False
    types = columns.get("type_symbol", [""])
    # Sites this close would be merged; those of other cells that overlap are refused later on.
    if not _ELEMENTS.issuperset(types) or _SITE_TOLERANCE * np.abs(cell).sum() >= MIN_DISTANCE:
        return False
    formula = block.data.get("_chemical_formula_sum", "?")
    return isinstance(formula, str) and (formula in _UNSTATED or _is_multiple(Counter(types), formula))


def _is_identity(texts: object) -> bool:
    return isinstance(texts, list) and [str(text).replace(" ", "") for text in texts] == ["x,y,z"]


def _is_multiple(counts: Counter[str], formula: str) -> bool:
    """Whether atoms, counted by element, are formula units of what is stated."""
    from pymatgen.core import Composition

    try:
        stated = Composition(formula).as_dict()
        units = {counts[symbol] / number for symbol, number in stated.items()}
    except Exception:  # what the formula leads to; pymatgen's own check says what is wrong with it
        return False
    return stated.keys() == counts.keys() and len(units) == 1


def _expanded(
    block: CifBlock, symbols: list[str], fractional: NDArray[np.float64], cell: NDArray[np.float64]
) -> tuple[list[str], NDArray[np.float64], list[str]]:
    """Symbols and fractional coordinates of all atoms, and notes, from the symbols and the sites listed."""
    from pymatgen.io.cif import CifParser

    numbers = np.array([atomic_numbers[plain_symbol(symbol)] for symbol in symbols])
    check_structure(numbers, fractional @ cell, cell, np.ones(3, dtype=bool))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the parser keeps them, see below
            parser = CifParser.from_str(str(block), frac_tolerance=0.0, check_cif=False)
            structure = parser.parse_structures(primitive=False, on_error="raise")[0]
        formula = block.data.get("_chemical_formula_sum", "?")
        mismatch = parser.check(structure) if formula not in _UNSTATED else None
    except Exception as error:  # pymatgen raises what a malformed block leads to
        raise InputError(f"cannot be read as CIF ({_reason(error)}); correct the file") from error
    if mismatch is not None:
        raise InputError(
            f"lists {structure.composition.formula} but states the formula {formula} "
            f"({' '.join(mismatch.split())[:120]}); correct the sites or _chemical_formula_sum"
        )
    notes = [f"pymatgen: {' '.join(text.split())}" for text in parser.warnings if not _BENIGN.match(text)]
    if len(structure) == len(symbols):
        return symbols, fractional, notes
    notes.append(f"the {len(symbols)} sites of the file are {len(structure)} atoms by symmetry")
    return [_symbol(site) for site in structure], np.array(structure.frac_coords), notes


def _site_symbols(texts: list[str], names: list[str], are_types: bool) -> list[str]:
    symbols = []
    for text, name in zip(texts, names, strict=True):
        found = (_TYPE_SYMBOL if are_types else _LABEL_SYMBOL).match(text)
        letters = found.group(1) if found else ""
        options = [letters.capitalize()] if are_types else [letters.capitalize(), letters[:1].upper()]
        symbol = next((s for s in options if plain_symbol(s) in chemical_symbols[1:]), None)
        if symbol is None:
            raise InputError(
                f"site {name} has the dummy or unknown element {text!r}; give it a real element or remove it"
            )
        symbols.append(symbol)
    return symbols


def _site_columns(block: CifBlock) -> dict[str, list[str]]:
    """Return the site columns that matter and are there, all of one length."""
    columns = {}
    for name in ("label", "fract_x", "fract_y", "fract_z", "type_symbol", "occupancy", "calc_flag"):
        values = block.data.get(f"_atom_site_{name}")
        if values is not None:
            columns[name] = [values] if isinstance(values, str) else list(values)
    missing = {"label", "fract_x", "fract_y", "fract_z"} - set(columns)
    if missing:
        raise InputError(
            f"has no _atom_site_{min(missing)}; give labels and fractional coordinates of all sites"
        )
    if len({len(values) for values in columns.values()}) > 1:
        raise InputError("has site columns of different lengths; give every value of every site")
    return columns


def _cell(block: CifBlock) -> NDArray[np.float64]:
    names = [f"length_{axis}" for axis in "abc"] + [f"angle_{angle}" for angle in ("alpha", "beta", "gamma")]
    values = [_number(block.data.get(f"_cell_{name}", "?"), name.replace("_", " ")) for name in names]
    with np.errstate(all="ignore"), contextlib.suppress(AssertionError):
        cell = cellpar_to_cell(values)
        check_cell(cell, np.ones(3, dtype=bool))
        return cell
    raise InputError(f"has the cell {values}, whose angles no cell can have; correct the cell")


def _number(text: object, what: str) -> float:
    """Return a CIF number without its uncertainty in brackets."""
    try:
        return float(str(text).partition("(")[0])
    except ValueError:
        raise InputError(
            f"has the {what} {text!r}, which is no number; correct it or remove the site"
        ) from None


def _reason(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]
