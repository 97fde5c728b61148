"""A raw record (dict of whatever an LMDB held) becomes a sample with the types of `fields.FIELDS`.

OC20's records carry float32 atomic numbers and fixed flags, plain Python ids and energies, no pbc; other
tools write NumPy arrays, float64, [3, 3] cells. All of it is settled here, once, or refused by name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from molflt.data.fields import FIELDS, FieldSpec, StructureData
from molflt.errors import InputError

REQUIRED = ("pos", "atomic_numbers")
_PYG_OWN = frozenset({"batch", "ptr", "num_nodes"})
_RANGES: dict[str, tuple[int, int]] = {"atomic_numbers": (1, 118), "tags": (0, 2), "fixed": (0, 1)}


def normalize_record(record: Mapping[str, Any], where: str = "record", default_sid: int = 0) -> StructureData:
    """Settle one record's fields: names, shapes and dtypes of `FIELDS`.

    Without `cell` the structure is open (zero cell, pbc false); with a cell and without `pbc` it repeats in
    all three directions, as OC20's systems do. Labels, tags and edges stay absent where they are absent.
    Fields outside the table are kept as they are, but for PyG's own `batch`, `ptr` and `num_nodes`.

    Args:
        record: field name to tensor, array, number or string, as `pickles.load_record` returns it.
        where: what to call the record in an error.
        default_sid: the id where the record has none.

    Raises:
        InputError: naming the record, the field, what is wrong with it and the remedy.
    """
    record = {name: value for name, value in record.items() if name not in _PYG_OWN}
    for name in REQUIRED:
        if name not in record:
            raise InputError(
                f"{where} has no {name!r}; a structure needs {' and '.join(map(repr, REQUIRED))}"
            )
    atoms = _tensor(record["atomic_numbers"], "atomic_numbers", where).numel()
    if atoms == 0:
        raise InputError(f"{where} has no atoms; leave it out of the data set")
    edges = _tensor(record["edge_index"], "edge_index", where).numel() // 2 if "edge_index" in record else 0
    record = {"natoms": atoms, "sid": default_sid} | record
    sizes = {"A": atoms, "E": edges}
    data = StructureData()
    for name, value in record.items():
        data[name] = _settled(value, FIELDS[name], sizes, where) if name in FIELDS else _as_kept(value)
    if int(data.natoms) != atoms:
        raise InputError(
            f"{where} says natoms = {int(data.natoms)} and has {atoms} atoms; correct the record"
        )
    if (
        "edge_index" in data
        and edges
        and not 0 <= int(data["edge_index"].min()) <= int(data["edge_index"].max()) < atoms
    ):
        raise InputError(f"{where} has an edge to an atom that is not there; drop or rebuild its edges")
    _settle_cell(data)
    return data


def _settle_cell(data: StructureData) -> None:
    periodic = "cell" in data and bool(data.cell.any())
    if "cell" not in data:
        data.cell = torch.zeros(1, 3, 3)
    if "pbc" not in data:
        data.pbc = torch.full((1, 3), periodic)


def _settled(value: Any, spec: FieldSpec, sizes: Mapping[str, int], where: str) -> Tensor:
    if spec.name == "sid":
        value = parse_sid(value, where)
    tensor = _tensor(value, spec.name, where)
    shape = tuple(sizes[n] if isinstance(n, str) else n for n in spec.shape)
    if tensor.numel() != math.prod(shape) or (len(shape) > 1 and tuple(tensor.shape[-1:]) != shape[-1:]):
        raise InputError(
            f"{where}: {spec.name!r} has shape {list(tensor.shape)}, expected {list(spec.shape)} = "
            f"{list(shape)}"
        )
    tensor = tensor.reshape(shape)
    settled = tensor.to(spec.dtype)
    if spec.dtype.is_floating_point and not bool(torch.isfinite(settled).all()):
        raise InputError(f"{where}: {spec.name!r} holds NaN or infinity; mend or leave out the record")
    if not spec.dtype.is_floating_point and not bool((settled == tensor).all()):
        raise InputError(
            f"{where}: {spec.name!r} holds values that are no {spec.dtype}; expected {spec.meaning}"
        )
    if spec.name in _RANGES:
        low, high = _RANGES[spec.name]
        worst = tensor[(tensor < low) | (tensor > high)]
        if worst.numel():
            raise InputError(f"{where}: {spec.name!r} holds {worst[0].item():g}; expected {spec.meaning}")
    return settled.contiguous()


def _tensor(value: Any, name: str, where: str) -> Tensor:
    if isinstance(value, Tensor):
        return value
    try:
        array = np.asarray(value)
        if array.dtype.kind in "biuf":
            return torch.from_numpy(np.array(array, dtype=array.dtype.newbyteorder("="), copy=True))
    except (TypeError, ValueError):
        pass
    raise InputError(f"{where}: {name!r} holds a {type(value).__name__}, expected numbers")


def parse_sid(value: Any, where: str = "record") -> int:
    """A record's id as an integer, from a number, a tensor or array of one, or text.

    OC20 names its systems `random123` in its mapping files and 123 in its LMDBs.

    Raises:
        InputError: it is neither.
    """
    if isinstance(value, str) and (digits := value.removeprefix("random")).isdecimal():
        value = int(digits)
    try:
        value = value.item() if isinstance(value, (Tensor, np.ndarray)) else value
        sid = int(value)
        exact = sid == value and abs(sid) < 2**63
    except (TypeError, ValueError, OverflowError, RuntimeError):
        exact, sid = False, 0
    if not exact:
        shown = " ".join(repr(value).split())[:80]
        raise InputError(f"{where}: 'sid' is {shown}, expected one integer")
    return sid


def _as_kept(value: Any) -> Any:
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        native = np.array(value, dtype=value.dtype.newbyteorder("="), copy=True)
        # Not every type of number that NumPy has (long double) is one of torch's.
        return native if native.dtype == np.longdouble else torch.from_numpy(native)
    return value
