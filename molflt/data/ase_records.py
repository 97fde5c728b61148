"""Records of OC20-format LMDBs as `ase.Atoms`, and back, with nothing lost in silence.

What ASE has a place for goes there: numbers, positions, cell, pbc, tags, fixed atoms as `FixAtoms`. The
other fields of a structure are per-atom arrays (`pos_relaxed`, `force`) and `info` entries (`sid`, `y_init`,
`y_relaxed`). One more `info` entry, `molflt`, is JSON that says which of `tags` and `fixed` the record had,
that its tags are OC20's, and holds the fields that only the user knows. Edges and Δpos are not carried:
`RadiusGraph` and `DeltaPos` make them again.

Atoms without that entry come from elsewhere: they are read as any structure file is
(`molflt.data.structures`), and every energy that a calculator left in them is a total energy, no adsorption
energy.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from ase import Atoms
from ase.constraints import FixAtoms
from torch import Tensor

from molflt.data.ase_databases import MARK
from molflt.data.copying import single_number, stored_fields
from molflt.data.fields import FIELDS
from molflt.data.records import normalize_record
from molflt.data.structures import StructureError, structure_from_atoms
from molflt.data.validity import check_structure
from molflt.errors import InputError

RECOMPUTABLE = frozenset({"edge_index", "cell_offsets", "distances", "delta_pos"})
"""Fields that follow from the others."""
_NUMBERS = ("sid", "y_init", "y_relaxed")
_VECTORS = ("pos_relaxed", "force")
_OPTIONAL = ("tags", "fixed")
_TOLD = ("tags ", "the energy in the file")
"""How notes begin that `tag_source` and `left_out` make superfluous."""
_OWN_ARRAYS = frozenset({"numbers", "positions", "tags", *_VECTORS})


class AtomsForm(NamedTuple):
    """A record as ASE holds it."""

    atoms: Atoms
    left_out: list[str]
    """Fields of the record that `atoms` does not carry."""


class RecordForm(NamedTuple):
    """Atoms as a record."""

    record: dict[str, Any]
    """Settled fields, as `write_lmdb` takes them; ids and energies are plain numbers, as in OC20."""
    tag_source: str
    """As in `molflt.data.structures.Structure`."""
    left_out: list[str]
    """What the atoms carry and a record does not."""
    notes: list[str]
    """Interpretations and oddities, but for tags and energies, which the other fields tell."""


def atoms_from_record(record: Mapping[str, Any], where: str = "record", default_sid: int = 0) -> AtomsForm:
    """Put a record's fields where ASE's writers find them.

    Args:
        record: the fields, as an LMDB held them.
        where: what to call the record in an error.
        default_sid: the id where the record has none.

    Raises:
        InputError: the record is not valid, as `normalize_record` says.
    """
    data = normalize_record(record, where, default_sid)
    atoms = Atoms(
        data.atomic_numbers.numpy(),
        positions=data["pos"].double().numpy(),
        cell=data.cell[0].double().numpy(),
        pbc=data.pbc[0].numpy(),
    )
    if "tags" in data:
        atoms.set_tags(data.tags.numpy())
    if "fixed" in data and bool(data.fixed.any()):
        atoms.set_constraint(FixAtoms(mask=data.fixed.numpy()))
    for name in _VECTORS:
        if name in data:
            atoms.set_array(name, data[name].double().numpy())
    for name in _NUMBERS:
        if name in data:
            atoms.info[name] = int(data.sid) if name == "sid" else single_number(record[name])
    extra, left_out = {}, []
    for name, value in data.to_dict().items():
        if name in RECOMPUTABLE:
            left_out.append(name)
        elif name not in FIELDS:
            if isinstance(value, (Tensor, bool, int, float, str)):
                extra[name] = _packed(value)
            else:
                left_out.append(name)
    fields = [name for name in _OPTIONAL if name in data]
    atoms.info[MARK] = json.dumps({"fields": fields, "extra": extra})
    return AtomsForm(atoms, left_out)


def record_from_atoms(
    atoms: Atoms,
    source: str = "Atoms",
    frame: int = 0,
    default_sid: int = 0,
    total_energy_as_label: bool = False,
) -> RecordForm:
    """Collect a record's fields from atoms of molflt's own making, or from anyone's.

    Args:
        atoms: as `atoms_from_record` makes them, or as any reader does; then tags are read or derived as for
            structure files, and fields are taken from `info` and arrays of the same name.
        source: the file, for errors.
        frame: position in the file, for errors.
        default_sid: the id where the atoms have none.
        total_energy_as_label: take a calculator's energy as `y_relaxed`. It is a total energy, whatever its
            reference: a model trained on it predicts total energies of that kind.

    Raises:
        StructureError: the structure is refused, or a field of it is.
    """
    try:
        return _collected(atoms, source, frame, default_sid, total_energy_as_label)
    except StructureError:
        raise
    except InputError as error:
        raise StructureError(source, frame, str(error)) from error


def _collected(
    atoms: Atoms, source: str, frame: int, default_sid: int, total_energy_as_label: bool
) -> RecordForm:
    mark = _read_mark(atoms.info.get(MARK))
    if mark is None:
        structure = structure_from_atoms(atoms, source, frame)
        data, tag_source = structure.data, structure.tag_source
        fields: dict[str, Any] = dict(data.to_dict())
        notes = [note for note in structure.notes if not note.startswith(_TOLD)]
    else:
        notes = []
        fields, tag_source = _own_fields(atoms, mark), "given" if "tags" in mark["fields"] else "none"
    fields["sid"] = atoms.info.get("sid", default_sid)
    fields |= {name: atoms.info[name] for name in ("y_init", "y_relaxed") if name in atoms.info}
    fields |= {name: atoms.arrays[name] for name in _VECTORS if name in atoms.arrays}
    results = dict(getattr(atoms.calc, "results", None) or {})
    if total_energy_as_label:
        if "y_relaxed" in fields:
            raise InputError(
                "has a y_relaxed of its own and a total energy; leave --total-energy-as-label out"
            )
        if results.get("energy") is None:
            raise InputError("has no total energy to take as y_relaxed; leave --total-energy-as-label out")
        fields["y_relaxed"] = results.pop("energy")
    own_info = {MARK, *_NUMBERS}
    left_out = [
        *(f"calculator's {name}" for name in results),
        *(f"array {name}" for name in atoms.arrays if name not in _OWN_ARRAYS),
        *(f"info {name}" for name in atoms.info if name not in own_info),
    ]
    data = normalize_record(fields, "structure", default_sid)
    return RecordForm(stored_fields(data, fields), tag_source, left_out, notes)


def _own_fields(atoms: Atoms, mark: Mapping[str, Any]) -> dict[str, Any]:
    numbers, pos, cell = np.asarray(atoms.numbers, np.int64), atoms.positions, np.asarray(atoms.cell.array)
    check_structure(numbers, pos, cell, atoms.pbc)
    fields = {"pos": pos, "cell": cell, "pbc": atoms.pbc, "atomic_numbers": numbers}
    if "tags" in mark["fields"]:
        fields["tags"] = atoms.get_tags()
    if "fixed" in mark["fields"]:
        fixed = np.zeros(len(atoms), dtype=bool)
        for constraint in atoms.constraints:
            if not isinstance(constraint, FixAtoms):
                raise InputError(f"has a constraint {type(constraint).__name__}, which a record cannot hold")
            fixed[constraint.index] = True
        fields["fixed"] = fixed
    return fields | {name: _unpacked(value, name) for name, value in mark["extra"].items()}


def _read_mark(text: Any) -> dict[str, Any] | None:
    if text is None:
        return None
    try:
        mark = json.loads(text)
        if set(mark["fields"]) <= set(_OPTIONAL) and not set(mark["extra"]) & set(FIELDS):
            return mark
    except (TypeError, ValueError, KeyError, AttributeError, RecursionError):
        pass
    raise InputError(f"has an info entry {MARK!r} that molflt did not write; remove or rename it")


def _packed(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    dtype = str(value.dtype).removeprefix("torch.")
    return {"dtype": dtype, "shape": list(value.shape), "values": value.flatten().tolist()}


def _unpacked(value: Any, name: str) -> Any:
    if not isinstance(value, dict):
        return value
    try:
        dtype = getattr(torch, value["dtype"])
        return torch.tensor(value["values"], dtype=dtype).reshape(value["shape"])
    except (AttributeError, KeyError, TypeError, ValueError, RuntimeError, OverflowError):
        raise InputError(f"has a damaged field {name!r} in its info entry {MARK!r}; remove it") from None
