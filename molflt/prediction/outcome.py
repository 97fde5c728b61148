"""What is known about a structure once its energy has been predicted."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
from ase import Atoms
from ase.constraints import FixAtoms
from numpy.typing import NDArray

from molflt.data.structures import Structure
from molflt.prediction.inputs import model_input

UncertaintyKind = Literal["ensemble", "redraws", "none"]


@dataclass(frozen=True)
class Prediction:
    """The predicted energy of a structure, and what it was computed from."""

    energy: float
    """Predicted energy, eV; of several checkpoints their mean. `Predictor.energy_meaning` says of what."""
    formula: str
    n_atoms: int
    source: str
    """File, or where else the structure came from."""
    frame: int
    """Number of the structure in its source, from 0."""
    id: str
    """The record's sid, or where there is none the file's name and the frame."""
    tag_source: str
    """Where the tags came from: given, derived, taken from layers, or none (all atoms count)."""
    pbc: str
    """Directions that repeat, such as TTF."""
    uncertainty: float | None
    """Standard deviation, eV, as `uncertainty_kind` says; None where there is nothing to spread."""
    uncertainty_kind: UncertaintyKind
    """`ensemble`: over the checkpoints; `redraws`: over draws of the network's random numbers, which says how
    well its attention is approximated and nothing of how well it is trained; `none`: not known."""
    unlike_training: bool
    """Whether the structure lies outside the training data; `notes` say in what."""
    notes: tuple[str, ...]
    """What to know about the structure as read, and how it is unlike the training data."""
    structure: Structure = field(repr=False, compare=False)
    delta_pos: NDArray[np.float64] | None = field(default=None, repr=False, compare=False)
    """Predicted relaxed minus given positions [A, 3], Å, 0 for fixed atoms; None where none is predicted."""

    def initial_atoms(self) -> Atoms:
        """The structure as given, with its tags and fixed atoms."""
        return structure_atoms(self.structure)

    def relaxed_atoms(self) -> Atoms:
        """The structure at its predicted relaxed positions.

        Raises:
            ValueError: no positions were predicted.
        """
        if self.delta_pos is None:
            raise ValueError(
                "no Δpos was predicted: the checkpoint has no head for it, or Predictor was made with "
                "displacements=False"
            )
        atoms = self.initial_atoms()
        atoms.set_positions(atoms.positions + self.delta_pos, apply_constraint=False)
        return atoms


def structure_atoms(structure: Structure) -> Atoms:
    """ASE's form of a structure; without tags where it has none."""
    filled = model_input(structure.data)
    atoms = Atoms(
        numbers=filled.atomic_numbers.numpy(),
        positions=filled["pos"].double().numpy(),
        cell=filled.cell[0].double().numpy(),
        pbc=filled.pbc[0].numpy(),
    )
    if structure.data.get("tags") is not None:
        atoms.set_tags(structure.data.tags.numpy())
    fixed = fixed_atoms(structure)
    if fixed.any():
        atoms.set_constraint(FixAtoms(mask=fixed))
    return atoms


def fixed_atoms(structure: Structure) -> NDArray[np.bool_]:
    """Mask [A] of the atoms that the structure holds in place."""
    fixed = structure.data.get("fixed")
    if fixed is None:
        return np.zeros(len(structure.data.atomic_numbers), dtype=bool)
    return fixed.bool().numpy()


def structure_id(structure: Structure) -> str:
    """The sid where the data have one, else the name of the source and the frame."""
    sid = structure.data.get("sid")
    return str(int(sid)) if sid is not None else f"{Path(structure.source).name}:{structure.frame}"
