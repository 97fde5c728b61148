"""Builds `datasets/oc20_sample`: genuine OC20 IS2RE systems as an LMDB laid out like OC20's own.

The source is a list of dicts with every field as OC20's LMDBs hold it. OC20 stores ids, atom counts and
energies as plain numbers and pickles PyG 1.x `Data`, so the sample does too: what reads it reads OC20.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from molflt.data.lmdb_writer import write_lmdb
from molflt.data.records import normalize_record
from molflt.errors import InputError

_INTEGERS = ("natoms", "sid")
_ENERGIES = ("y_init", "y_relaxed")


def build_oc20_sample(source: str | Path, output_dir: str | Path) -> Path:
    """Build `output_dir/data.lmdb`; the same source gives the same bytes.

    Args:
        source: a `torch.save`d list of dicts of tensors, one per system.
        output_dir: folder to fill.

    Returns:
        The LMDB file.

    Raises:
        InputError: the source is missing, is not such a list, or a system is not valid.
    """
    systems = _load(source)
    for number, system in enumerate(systems):
        normalize_record(system, f"system {number} of {source}")
    path = Path(output_dir) / "data.lmdb"
    write_lmdb(path, map(_as_stored, systems), layout="pyg1", with_length=False)
    return path


def _as_stored(system: dict[str, Any]) -> dict[str, Any]:
    def stored(name: str, value: Any) -> Any:
        if name in _INTEGERS and isinstance(value, Tensor):
            return int(value)
        return float(value) if name in _ENERGIES and isinstance(value, Tensor) else value

    return {name: stored(name, value) for name, value in system.items()}


def _load(source: str | Path) -> list[dict[str, Any]]:
    try:
        systems = torch.load(source, map_location="cpu", weights_only=True)
    except OSError as error:
        raise InputError(f"{source} cannot be read: {error.strerror or error}") from None
    except Exception as error:  # torch's reader answers a foreign file with whatever it stumbles over
        raise InputError(f"{source} is no torch file of plain tensors ({type(error).__name__})") from None
    if (
        not isinstance(systems, list)
        or not systems
        or not all(isinstance(system, dict) for system in systems)
    ):
        raise InputError(f"{source} is no list of systems; give oc20_is2re_8_raw_fields.pt")
    return systems
