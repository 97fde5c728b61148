"""Builds `datasets/fcc111`: adsorption on fcc(111) metals as initial structures, relaxed targets and splits.

The source lists DFT-relaxed structures of a 2 x 2 x 4 slab with one to four equal adsorbates, and the
adsorption energy per adsorbate. The initial structure is rebuilt from the record's labels alone: the ideal
slab of `ase.build.fcc111` with the lattice constant of the record's cell, its bottom layer at the record's
height, and each adsorbate above the labelled site at the height where it touches its nearest metal atoms,
radii being covalent (Cordero et al., Dalton Trans. 2832 (2008), as in ASE). Nothing of the relaxed positions
enters it. Four adsorbates of one site take its four copies in the order (0, 0), (1, 0), (0, 1), (1, 1) of
the 1 x 1 cell, as all source records do; each record is checked against that.

A record is left out if an atom has moved so far that the rebuilt structure is not shown to be its start: a
metal atom, or an adsorbate sideways, by more than half the distance of nearest neighbours, so that it may be
nearer to another site than to its own. A tall adsorbate (bromine at full coverage rises by 1.9 Å) stays
in: it is above its labelled site, and its height before relaxation is a convention.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from molflt.data.fcc111_report import write_split_report
from molflt.data.fcc111_splits import assign_splits, choose_examples
from molflt.data.lmdb_writer import write_lmdb
from molflt.errors import InputError

SITES = {"ontop": (0.0, 0.0), "bridge": (0.5, 0.0), "fcc": (1 / 3, 1 / 3), "hcp": (2 / 3, 2 / 3)}
"""Site positions in the 1 x 1 surface cell, `ase.build.fcc111`'s."""
COPIES = ((0, 0), (1, 0), (0, 1), (1, 1))
"""1 x 1 cells that one to four adsorbates take, in order."""
SIZE = (2, 2, 4)
MIN_HEIGHT = 0.5
"""Å; hydrogen's covalent sphere is smaller than a hollow of gold, and would sink into the layer."""

_FIELDS = ("metal", "adsorbate", "site", "coverage", "symbols", "cell", "pos_relaxed")
_ENERGY = "adsorption_energy_per_adsorbate_eV"
_LAYER_ATOMS = SIZE[0] * SIZE[1]
_SLAB_ATOMS = _LAYER_ATOMS * SIZE[2]
_FIXED_LAYERS = 2
_DECIMALS = 6  # those of the source's positions; what is left after them depends on the machine


class System(NamedTuple):
    """One source record with its rebuilt initial structure."""

    metal: str
    adsorbate: str
    site: str
    num_adsorbates: int
    initial: Any
    """`ase.Atoms`, tags as in OC20, the two bottom layers fixed."""
    pos_relaxed: np.ndarray
    """Relaxed positions [A, 3], Å."""
    delta_pos: np.ndarray
    """Minimum image of relaxed - initial [A, 3], Å."""
    energy: float
    """Adsorption energy of all adsorbates together, eV."""

    @property
    def name(self) -> str:
        """E.g. `Pt-C-bridge-1`: metal, adsorbate, site, number of adsorbates."""
        return f"{self.metal}-{self.adsorbate}-{self.site}-{self.num_adsorbates}"

    @property
    def triple(self) -> tuple[str, str, str]:
        """What the splits keep apart."""
        return self.metal, self.adsorbate, self.site

    @property
    def sid(self) -> int:
        """Readable id: atomic numbers of metal and adsorbate, site (1 to 4), number of adsorbates; 780621."""
        metal, adsorbate = (int(self.initial.numbers[index]) for index in (0, -1))
        return ((metal * 100 + adsorbate) * 10 + list(SITES).index(self.site) + 1) * 10 + self.num_adsorbates


def build_fcc111(source_json: str | Path, output_dir: str | Path) -> Path:
    """Build the data set: one LMDB per split, `structures/` with ten files of val_id, and `SPLITS.md`.

    The same source gives the same files, byte for byte where the page size of memory is the same.

    Args:
        source_json: the source records.
        output_dir: folder to fill; files of these names there are replaced.

    Returns:
        The folder.

    Raises:
        InputError: the source is missing or is not such a list of records.
    """
    output_dir = Path(output_dir)
    systems = [
        rebuild_system(record, number, source_json) for number, record in enumerate(_load(source_json))
    ]
    reasons = [mismatch(system) for system in systems]
    splits = assign_splits([s for s, reason in zip(systems, reasons, strict=True) if reason is None])
    left_out = [(s, reason) for s, reason in zip(systems, reasons, strict=True) if reason is not None]
    for split, members in splits.items():
        if not members:
            raise InputError(f"{source_json} has no records for split {split}; build from the whole source")
    doubles = [name for name, count in Counter(system.name for system in systems).items() if count > 1]
    if doubles:
        raise InputError(f"{source_json} has {doubles[0]} more than once; remove all but one")
    for split, members in splits.items():
        write_lmdb(output_dir / split / "data.0000.lmdb", map(to_record, members))
    examples = choose_examples(splits["val_id"])
    write_structures(examples, output_dir / "structures")
    write_split_report(output_dir / "SPLITS.md", splits, left_out)
    return output_dir


def rebuild_system(record: dict[str, Any], number: int = 0, source: str | Path = "source") -> System:
    """Rebuild one record's initial structure.

    Args:
        record: metal, adsorbate, site, coverage, symbols, cell and pos_relaxed (Å), adsorption energy per
            adsorbate (eV).
        number: the record's place in `source`, for errors.

    Raises:
        InputError: a field is missing, or cell, order of atoms or coverage are not those of a 2 x 2 x 4
            fcc(111) slab.
    """
    try:
        return _rebuild(record)
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        reason = error if isinstance(error, _NotASlab) else f"it is malformed ({type(error).__name__})"
        raise InputError(f"record {number} of {source}: {reason}; rebuild from an unaltered source") from None


class _NotASlab(ValueError):
    pass


def _check(condition: bool, what: str) -> None:
    if not condition:
        raise _NotASlab(what)


def _rebuild(record: dict[str, Any]) -> System:
    from ase import Atoms
    from ase.build import fcc111
    from ase.constraints import FixAtoms
    from ase.data import atomic_numbers, covalent_radii

    missing = [name for name in (*_FIELDS, _ENERGY) if name not in record]
    _check(not missing, f"it has no {', '.join(missing)}")
    metal, adsorbate, site = record["metal"], record["adsorbate"], record["site"]
    cell, relaxed = np.array(record["cell"], dtype=float), np.array(record["pos_relaxed"], dtype=float)
    count = round(record["coverage"] * _LAYER_ATOMS)
    _check(site in SITES, f"its site {site!r} is none of {', '.join(SITES)}")
    _check(1 <= count <= len(COPIES), f"its coverage {record['coverage']} is not 1 to {len(COPIES)} atoms")
    _check(
        record["symbols"] == [metal] * _SLAB_ATOMS + [adsorbate] * count,
        "its atoms are not the slab's and then the adsorbates",
    )
    _check(relaxed.shape == (_SLAB_ATOMS + count, 3), "it does not have one position an atom")

    neighbor = cell[0, 0] / SIZE[0]
    slab = fcc111(metal, SIZE, a=neighbor * np.sqrt(2.0))
    is_fcc111 = neighbor > 1.0 and np.allclose(slab.cell.array[:2], cell[:2], atol=1e-4)
    _check(bool(is_fcc111), "its cell is not a 2 x 2 fcc(111) cell")
    slab.positions[:, 2] += relaxed[:_LAYER_ATOMS, 2].mean() - slab.positions[:_LAYER_ATOMS, 2].mean()

    reach = covalent_radii[atomic_numbers[metal]] + covalent_radii[atomic_numbers[adsorbate]]
    lateral = neighbor * {"ontop": 0.0, "bridge": 1 / 2, "fcc": 3**-0.5, "hcp": 3**-0.5}[site]
    height = max(np.sqrt(max(reach**2 - lateral**2, 0.0)), MIN_HEIGHT)
    sites = (np.array(SITES[site]) + np.array(COPIES[:count])) @ (cell[:2] / SIZE[0])
    sites[:, 2] = slab.positions[:, 2].max() + height

    positions = np.vstack([slab.positions, sites]).round(_DECIMALS)
    initial = Atoms(record["symbols"], positions=positions, cell=cell, pbc=True)
    layer = np.arange(_SLAB_ATOMS) // _LAYER_ATOMS
    initial.set_tags([*(1 if n == SIZE[2] - 1 else 0 for n in layer), *[2] * count])
    initial.set_constraint(FixAtoms(indices=np.flatnonzero(layer < _FIXED_LAYERS)))
    return System(
        metal,
        adsorbate,
        site,
        count,
        initial,
        relaxed,
        _minimum_image(relaxed - initial.positions, cell),
        float(record[_ENERGY]) * count,
    )


def mismatch(system: System) -> str | None:
    """Why the rebuilt structure is not shown to be the record's start, or None where it is."""
    limit = system.initial.cell[0, 0] / SIZE[0] / 2
    moved = np.linalg.norm(system.delta_pos, axis=1)
    sideways = np.linalg.norm(system.delta_pos[:, :2], axis=1)
    slab, adsorbates = moved[:_SLAB_ATOMS], sideways[_SLAB_ATOMS:]
    bottom = moved[: _LAYER_ATOMS * _FIXED_LAYERS]
    if bottom.max() > 0.01:
        return f"fixed atom {bottom.argmax()} is {bottom.max():.2f} Å off its ideal place"
    if slab.max() > limit:
        return (
            f"metal atom {slab.argmax()} moved {slab.max():.2f} Å, half a neighbour distance is {limit:.2f} Å"
        )
    if adsorbates.max() > limit:
        atom = _SLAB_ATOMS + adsorbates.argmax()
        return f"adsorbate atom {atom} moved {adsorbates.max():.2f} Å sideways, beyond {limit:.2f} Å"
    return None


def to_record(system: System) -> dict[str, Any]:
    """The system's fields, types as in OC20's LMDBs."""
    initial = system.initial
    fixed = np.zeros(len(initial))
    fixed[initial.constraints[0].index] = 1
    return {
        "pos": torch.tensor(initial.positions, dtype=torch.float32),
        "cell": torch.tensor(np.array(initial.cell), dtype=torch.float32).view(1, 3, 3),
        "atomic_numbers": torch.tensor(initial.numbers, dtype=torch.float32),
        "natoms": len(initial),
        "fixed": torch.tensor(fixed, dtype=torch.float32),
        "sid": system.sid,
        "tags": torch.tensor(initial.get_tags(), dtype=torch.int64),
        "y_relaxed": system.energy,
        "pos_relaxed": torch.tensor(system.pos_relaxed, dtype=torch.float32),
    }


def write_structures(systems: Sequence[System], folder: Path) -> list[Path]:
    """Write initial structures as a user would have them: extxyz (with OC20 tags), CIF and POSCAR in turn."""
    from ase.io import write

    folder.mkdir(parents=True, exist_ok=True)
    formats = (("extxyz", ".extxyz"), ("cif", ".cif"), ("vasp", ".vasp"))
    paths = []
    for number, system in enumerate(systems):
        kind, suffix = formats[number % len(formats)]
        paths.append(folder / f"{system.name}{suffix}")
        write(paths[-1], system.initial, format=kind)
    return paths


def _load(source: str | Path) -> list[dict[str, Any]]:
    try:
        records = json.loads(Path(source).read_text())
    except OSError as error:
        raise InputError(f"{source} cannot be read: {error.strerror or error}") from None
    except ValueError as error:
        raise InputError(f"{source} is no JSON: {error}") from None
    if (
        not isinstance(records, list)
        or not records
        or not all(isinstance(record, dict) for record in records)
    ):
        raise InputError(f"{source} is no list of records; give fcc111_adsorption.json")
    return records


def _minimum_image(displacement: np.ndarray, cell: np.ndarray) -> np.ndarray:
    from ase.geometry import find_mic

    return find_mic(displacement, cell, pbc=True)[0]
