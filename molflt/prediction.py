"""Relaxed energies of structures: from files, ASE, pymatgen or PyG `Data`, with a checkpoint alone."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from ase import Atoms
from ase.data import chemical_symbols
from ase.formula import Formula
from torch_geometric.data import Batch, Data

from molflt.build import build_transform
from molflt.checkpoint import Checkpoint, load_checkpoint
from molflt.data.fields import StructureData
from molflt.data.structures import (
    Structure,
    StructureError,
    structure_from_atoms,
    structure_from_pymatgen,
)
from molflt.data.validity import check_structure
from molflt.errors import InputError

OUTPUT_COLUMNS: tuple[str, ...] = (
    "source",
    "frame",
    "formula",
    "n_atoms",
    "energy",
    "energy_meaning",
    "tag_source",
    "notes",
    "error",
)


@dataclass(frozen=True)
class Prediction:
    """The predicted energy of a structure, and what it was computed from."""

    energy: float
    """Predicted energy, eV; `Predictor.energy_meaning` says of what."""
    formula: str
    n_atoms: int
    source: str
    """File, or where else the structure came from."""
    frame: int
    """Number of the structure in its source, from 0."""
    tag_source: str
    """Where the tags came from: given, derived, taken from layers, or none (all atoms count)."""
    notes: tuple[str, ...]
    """What to know about the structure as read, and how it is unlike the training data."""


class Predictor:
    """Predicts energies with the network of a checkpoint.

    A structure's energy does not depend on which others are predicted with it or in what order.

    Example:
        >>> predictor = Predictor.from_checkpoint("best.ckpt")  # doctest: +SKIP
        >>> predictor.predict([atoms])[0].energy  # doctest: +SKIP
    """

    def __init__(self, checkpoint: Checkpoint, device: torch.device | str = "cpu") -> None:
        self.checkpoint = checkpoint
        self.device = torch.device(device)
        self.model = checkpoint.model.to(self.device).eval()
        self.energy_meaning = checkpoint.metadata.energy_meaning
        self._transform = build_transform(checkpoint.config.data, False)

    @classmethod
    def from_checkpoint(cls, path: str | os.PathLike[str], device: torch.device | str = "cpu") -> Predictor:
        """Read a checkpoint file; `InputError` where it is missing or not one."""
        return cls(load_checkpoint(path), device)

    def predict(self, structures: Iterable[Any], batch_size: int = 32) -> list[Prediction]:
        """Predict the energies of ASE `Atoms`, pymatgen structures or molecules, `Structure` or `Data`.

        The order is kept. Raises `InputError` for the first structure that can not be predicted.
        """
        if isinstance(structures, (str, os.PathLike)) or _converter(structures) is not None:
            raise TypeError(f"structures is one {type(structures).__name__}; put it in a list")
        predictions: list[Prediction] = []
        converted = (as_structure(structure, number) for number, structure in enumerate(structures))
        for outcome in self.iter_predict(converted, batch_size):
            if isinstance(outcome, InputError):
                raise outcome
            predictions.append(outcome)
        return predictions

    def iter_predict(
        self, structures: Iterable[Structure | InputError], batch_size: int = 32
    ) -> Iterator[Prediction | InputError]:
        """Predict a stream of structures in order, `batch_size` at a time; errors in it pass through."""
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        waiting: list[tuple[Structure, Data] | InputError] = []
        ready = 0
        for structure in structures:
            waiting.append(self._prepare(structure))
            ready += isinstance(waiting[-1], tuple)
            if ready == batch_size:
                yield from self._predict_batch(waiting)
                waiting, ready = [], 0
        yield from self._predict_batch(waiting)

    def _prepare(self, structure: Structure | InputError) -> tuple[Structure, Data] | InputError:
        if isinstance(structure, InputError):
            return structure
        try:
            return structure, self._transform(model_input(structure.data))
        except InputError as error:
            return error

    def _predict_batch(
        self, items: Sequence[tuple[Structure, Data] | InputError]
    ) -> Iterator[Prediction | InputError]:
        samples: list[Any] = [item[1] for item in items if not isinstance(item, InputError)]
        energies: Iterator[float] = iter(())
        if samples:
            batch: Any = Batch.from_data_list(samples)
            with torch.inference_mode():
                energies = iter(self.model(batch.to(self.device)).energy.double().tolist())
        for item in items:
            yield item if isinstance(item, InputError) else self._describe(item[0], next(energies))

    def _describe(self, structure: Structure, energy: float) -> Prediction:
        return Prediction(
            energy=energy,
            formula=structure.formula,
            n_atoms=len(structure.data.atomic_numbers),
            source=structure.source,
            frame=structure.frame,
            tag_source=structure.tag_source,
            notes=(*structure.notes, *self._unlike_training(structure.data)),
        )

    def _unlike_training(self, data: Data) -> list[str]:
        metadata = self.checkpoint.metadata
        notes = []
        unseen = sorted({*data.atomic_numbers.tolist()} - {*metadata.elements})
        if unseen and metadata.elements:
            notes.append(
                "not in the training data: " + ", ".join(chemical_symbols[number] for number in unseen)
            )
        if metadata.num_atoms_range:
            fewest, most = metadata.num_atoms_range
            if not fewest <= len(data.atomic_numbers) <= most:
                notes.append(f"training systems have {fewest} to {most} atoms")
        return notes


def as_structure(structure: Any, number: int = 0) -> Structure:
    """A `Structure` from ASE `Atoms`, a pymatgen object, `Data` or a `Structure`; TypeError for others."""
    convert = _converter(structure)
    if convert is None:
        raise TypeError(
            f"structure {number} is a {type(structure).__name__}; give ase.Atoms, a pymatgen Structure or "
            "Molecule, a torch_geometric Data or what molflt.data.structures.read_structures returns"
        )
    return convert(structure, f"structure {number}")


def _converter(structure: Any) -> Callable[[Any, str], Structure] | None:
    if isinstance(structure, Structure):
        return lambda structure, source: structure
    if isinstance(structure, Data):
        return structure_from_data
    if isinstance(structure, Atoms):
        return structure_from_atoms
    # By its module, as importing pymatgen takes longer than reading most files.
    return structure_from_pymatgen if type(structure).__module__.startswith("pymatgen.") else None


def structure_from_data(data: Data, source: str = "Data") -> Structure:
    """A `Structure` from a PyG `Data` with `pos` (Å) and `atomic_numbers`; a `sid` becomes its source.

    Raises `InputError` where these are missing and for what is refused in a file, such as overlapping atoms.
    """
    if data.get("sid") is not None:
        source = f"sid {int(data.sid)}"
    for name in ("pos", "atomic_numbers"):
        if data.get(name) is None:
            raise InputError(f"{source} has no {name}; a structure needs pos (Å) and atomic_numbers")
    filled = model_input(data)
    fields = (filled.atomic_numbers, filled["pos"], filled.cell[0], filled.pbc[0])
    try:
        check_structure(*(field.numpy() for field in fields))
        if ((filled.tags < 0) | (filled.tags > 2)).any():
            raise InputError("has tags other than 0, 1 and 2; give OC20's, or none")
    except InputError as error:
        raise StructureError(source, None, str(error)) from error
    formula = Formula.from_list([chemical_symbols[z] for z in filled.atomic_numbers.tolist()]).format("hill")
    tag_source = "none" if data.get("tags") is None else "given"
    return Structure(data, source=source, frame=0, formula=formula, tag_source=tag_source)


def model_input(data: Data) -> StructureData:
    """The fields a network reads, with absent ones filled, so that any structures can share a batch.

    Without `cell` nothing repeats; without `pbc` a cell repeats in all directions, as in OC20; without
    `tags` all are 0 and every atom counts.
    """
    numbers, cell, pbc = data.atomic_numbers, data.get("cell"), data.get("pbc")
    if pbc is None:
        pbc = torch.full((1, 3), cell is not None)
    return StructureData(
        pos=data["pos"].float(),
        atomic_numbers=numbers.long(),
        cell=torch.zeros(1, 3, 3) if cell is None else cell.float().reshape(1, 3, 3),
        pbc=pbc.bool().reshape(1, 3),
        tags=torch.zeros_like(numbers, dtype=torch.long) if data.get("tags") is None else data.tags.long(),
    )


def check_output(path: str | os.PathLike[str]) -> None:
    """Raise `InputError` unless predictions can be written to `path`."""
    if Path(path).suffix not in (".csv", ".json"):
        raise InputError(f"cannot tell the format of {path}; end its name in .csv or .json")
    if Path(path).is_dir() or not Path(path).parent.is_dir():
        raise InputError(f"cannot write {path}; give a file name in a folder that exists")


def write_predictions(
    path: str | os.PathLike[str], outcomes: Sequence[Prediction | InputError], energy_meaning: str
) -> None:
    """Write a row per structure, in order, as .csv or .json; failed ones have an `error` and nothing else.

    The file appears whole or not at all. Energies are in eV.
    """
    target = Path(path)
    check_output(target)
    rows = [_row(outcome, energy_meaning) for outcome in outcomes]
    partial = target.with_name(f".{target.name}.partial")
    try:
        with partial.open("w", encoding="utf-8", newline="") as file:
            if target.suffix == ".json":
                json.dump(rows, file, indent=1, ensure_ascii=False)
                file.write("\n")
            else:
                writer = csv.DictWriter(file, OUTPUT_COLUMNS, lineterminator="\n")
                writer.writeheader()
                writer.writerows({**row, "notes": "; ".join(row.get("notes", ()))} for row in rows)
        partial.replace(target)
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}; give another --output") from error
    finally:
        partial.unlink(missing_ok=True)


def _row(outcome: Prediction | InputError, energy_meaning: str) -> dict[str, Any]:
    if isinstance(outcome, InputError):
        where = {"source": getattr(outcome, "source", None), "frame": getattr(outcome, "frame", None)}
        return dict.fromkeys(OUTPUT_COLUMNS) | where | {"notes": [], "error": str(outcome)}
    return {
        "source": outcome.source,
        "frame": outcome.frame,
        "formula": outcome.formula,
        "n_atoms": outcome.n_atoms,
        "energy": outcome.energy,
        "energy_meaning": energy_meaning,
        "tag_source": outcome.tag_source,
        "notes": list(outcome.notes),
        "error": None,
    }
