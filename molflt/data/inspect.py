"""What is in an OC20-format LMDB: counts, fields, elements, sizes and energies, for a table or JSON."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy as np
from torch import Tensor

from molflt.data.fields import FIELDS
from molflt.data.lmdb import RecordReader
from molflt.data.records import normalize_record

_BINS = 10
_LABELS = ("y_relaxed", "y_init")


def inspect_lmdb(path: str | os.PathLike[str], progress: bool = False) -> dict[str, Any]:
    """Read every record once and sum up.

    Args:
        path: an LMDB file, a folder of shards, or a folder with `data.lmdb`.
        progress: show a progress bar on stderr.

    Returns:
        A dict ready for JSON: `path`, `files` (path, records, bytes each), `records`; `fields` (per field:
        records that have it, shape with A and E for atoms and edges, dtype as stored, unit, meaning);
        `missing` (the table's fields that some or all records lack, with how many do); `elements` (symbol to
        number of systems with it); `atoms`, `edges` and one entry per energy label (n, min, max, mean, std,
        histogram with `edges` and `counts`); `duplicate_sids`.

    Raises:
        InputError: nothing readable there, or a record that is damaged or not valid, named.
    """
    from ase.data import chemical_symbols

    reader = RecordReader(path)
    present: Counter[str] = Counter()
    stored: dict[str, Counter[str]] = {}
    shapes: dict[str, Counter[str]] = {}
    elements: Counter[int] = Counter()
    atoms: list[int] = []
    edges: list[int] = []
    sids: list[int] = []
    labels: dict[str, list[float]] = {name: [] for name in _LABELS}
    for index in _tracked(range(len(reader)), progress):
        record, name = reader.read(index)
        data = normalize_record(record, name, default_sid=index)
        present.update(record.keys())
        for field, value in record.items():
            stored.setdefault(field, Counter())[_dtype(value)] += 1
            shapes.setdefault(field, Counter())[_shape(field, value)] += 1
        elements.update(set(data.atomic_numbers.tolist()))
        atoms.append(int(data.natoms))
        sids.append(int(data.sid))
        if "edge_index" in data:
            edges.append(data["edge_index"].shape[1])
        for label in _LABELS:
            if label in data:
                labels[label].append(float(data[label]))
    total = len(reader)
    summary: dict[str, Any] = {
        "path": str(path),
        "files": [
            {"path": str(file.path), "records": len(file), "bytes": file.pages.size} for file in reader.files
        ],
        "records": total,
        "fields": {
            field: {
                "records": present[field],
                "shape": _commonest(shapes[field]),
                "dtype": _commonest(stored[field]),
                "unit": FIELDS[field].unit if field in FIELDS else "",
                "meaning": FIELDS[field].meaning if field in FIELDS else "",
            }
            for field in sorted(present)
        },
        "missing": {field: total - present[field] for field in FIELDS if present[field] < total},
        "elements": {chemical_symbols[number]: elements[number] for number in sorted(elements)},
        "atoms": _distribution(atoms),
        "duplicate_sids": total - len(set(sids)),
    }
    if edges:
        summary["edges"] = _distribution(edges)
    return summary | {label: _distribution(values) for label, values in labels.items() if values}


def _distribution(values: list[int] | list[float]) -> dict[str, Any]:
    array = np.asarray(values, dtype=np.float64)
    counts, borders = np.histogram(array, bins=_BINS)
    return {
        "n": len(array),
        "min": float(array.min()),
        "max": float(array.max()),
        "mean": float(array.mean()),
        "std": float(array.std()),
        "histogram": {"edges": borders.tolist(), "counts": counts.tolist()},
    }


def _dtype(value: Any) -> str:
    if isinstance(value, Tensor):
        return str(value.dtype).removeprefix("torch.")
    if isinstance(value, (np.ndarray, np.generic)):
        return f"numpy {value.dtype}"
    return type(value).__name__


def _shape(field: str, value: Any) -> str:
    """The stored shape, with the numbers of atoms and edges written as A and E where the table has them."""
    shape = (
        tuple(value.shape)
        if isinstance(value, (Tensor, np.ndarray))
        else np.shape(value)
        if value != ""
        else ()
    )
    names = FIELDS[field].shape if field in FIELDS else ()
    if len(names) != len(shape):
        names = shape
    return (
        "["
        + ", ".join(str(n if isinstance(n, str) else size) for n, size in zip(names, shape, strict=True))
        + "]"
    )


def _commonest(values: Counter[str]) -> str:
    first, *others = (value for value, _ in values.most_common())
    return f"{first} (also {', '.join(others)})" if others else first


def _tracked(indices: range, progress: bool) -> Iterable[int]:
    if not progress:
        return indices
    from rich.console import Console
    from rich.progress import track

    return track(indices, description="Reading records", console=Console(stderr=True))
