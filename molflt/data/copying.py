"""Copies records from one LMDB to another as they are, each read and checked on the way."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from molflt.data.fields import StructureData
from molflt.data.lmdb import RecordReader
from molflt.data.pickle_writer import dump_record
from molflt.data.records import normalize_record
from molflt.errors import InputError

_ENERGIES = ("y_init", "y_relaxed")


def copied_record(reader: RecordReader, index: int) -> tuple[bytes, StructureData]:
    """The pickle of record `index` for another LMDB, and its settled fields.

    It is the bytes of the source, so no field of any kind is lost. Only a record without an id of its own is
    written anew, as elsewhere its place would give it another id.

    Raises:
        InputError: the record is damaged, refused or not valid.
    """
    record, name = reader.read(index)
    data = normalize_record(record, name, default_sid=index)
    if "sid" in record:
        file, number = reader.locate(index)
        return file.read(number), data
    try:
        return dump_record(stored_fields(data, record)), data
    except TypeError as error:
        raise InputError(f"{name} has no sid and cannot be given one: {error}; remove that field") from None


def stored_fields(data: StructureData, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Settled fields as OC20 stores them: ids as integers, energies in the precision that `fields` has."""
    record = dict(data.to_dict())
    for name in ("sid", "natoms"):
        record[name] = int(record[name])
    for name in _ENERGIES:
        if name in record:
            record[name] = single_number(fields[name])
    return record


def single_number(value: Any) -> float:
    """The one number of a tensor, an array or a plain number."""
    return float(value.item() if isinstance(value, (Tensor, np.ndarray)) else value)
