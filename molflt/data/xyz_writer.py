"""Extended XYZ with every digit that float32 holds.

ASE's writer prints eight decimals, which rounds small coordinates and forces. Here numbers of a float32 field
have nine significant digits, from which the same float32 is read back, and energies all that a float64
needs. `molflt.data.xyz`, ASE and other readers of extended XYZ read the result.
"""

from __future__ import annotations

import json
from typing import Any, TextIO

import numpy as np
from ase import Atoms
from ase.constraints import FixAtoms
from numpy.typing import NDArray


def write_xyz_frame(stream: TextIO, atoms: Atoms) -> None:
    """Write one frame: columns species, pos, then tags, move_mask and [A, 3] arrays where there are any.

    Args:
        stream: text file.
        atoms: as `ase_records.atoms_from_record` makes them; positions and arrays hold float32 numbers,
            constraints are `FixAtoms`, `info` holds numbers and strings.
    """
    properties, columns = ["species:S:1"], [np.array(atoms.get_chemical_symbols())[:, None]]

    def add(name: str, kind: str, values: NDArray[Any]) -> None:
        properties.append(f"{name}:{kind}:{values.shape[1]}")
        columns.append(values)

    add("pos", "R", _digits(atoms.positions))
    if atoms.has("tags"):
        add("tags", "I", atoms.get_tags().astype(str)[:, None])
    if atoms.constraints:
        moves = np.full(len(atoms), "T")
        for constraint in atoms.constraints:
            assert isinstance(constraint, FixAtoms)
            moves[constraint.index] = "F"
        add("move_mask", "L", moves[:, None])
    for name, values in atoms.arrays.items():
        if name not in ("numbers", "positions", "tags"):
            add(name, "R", _digits(values))
    entries = [f"Properties={':'.join(properties)}"]
    if atoms.cell.array.any():
        entries.append(f'Lattice="{" ".join(_digits(atoms.cell.array).ravel())}"')
    entries.append(f'pbc="{" ".join("FT"[int(flag)] for flag in atoms.pbc)}"')
    entries += [f"{name}={_entry(value)}" for name, value in atoms.info.items()]
    rows = "\n".join(" ".join(row) for row in np.concatenate(columns, axis=1))
    stream.write(f"{len(atoms)}\n{' '.join(entries)}\n{rows}\n")


def _digits(values: NDArray[np.float64]) -> NDArray[np.str_]:
    return np.array([f"{value:.9g}" for value in values.ravel()]).reshape(values.shape)


def _entry(value: Any) -> str:
    """Numbers as they are; text as JSON, so that what looks like a number or a flag stays text."""
    if not isinstance(value, str):
        return repr(value)
    text = f"_JSON {json.dumps(value)}".replace("\\", "\\\\").replace('"', '\\"')
    return f'"{text}"'
