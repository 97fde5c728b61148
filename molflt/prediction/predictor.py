"""Predicts with one checkpoint or several: batches, ensemble statistics, one `Prediction` per structure."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from ase.data import chemical_symbols
from torch_geometric.data import Data

from molflt.checkpoint import Checkpoint, CheckpointMetadata, common_energy_meaning, load_checkpoint
from molflt.data.structures import Structure, StructureError
from molflt.errors import InputError
from molflt.prediction.inputs import as_structure, converter
from molflt.prediction.member import Member, MemberOutput
from molflt.prediction.outcome import Prediction, UncertaintyKind, fixed_atoms, structure_id

DEFAULT_REDRAWS = 4
DEFAULT_BATCH_SIZE = 128
"""Structures; larger ones gain nothing more on a CPU."""
MAX_BATCH_ATOMS = 32_768
"""Atoms of a batch, padding counted, from which on it is closed early."""

_Prepared = tuple[Structure, list[Data]]


class Predictor:
    """Predicts relaxed energies with the network of a checkpoint, or with several as an ensemble.

    A structure's energy does not depend on which others are predicted with it, in what order, or in how large
    batches: networks run in float64, where the different order of sums changes energies by 1e-13 eV
    (in float32 by up to 4e-6 eV) and a batch of slabs takes 2.4 times as long. Other draws of the random
    numbers, from which the uncertainty comes, run in float32.

    Args:
        checkpoints: one, or several whose energies mean the same; their mean is predicted, and the
            uncertainty is their standard deviation.
        device: where to compute.
        redraws: of a single checkpoint, how many other draws of its random frequencies and features are
            evaluated; the uncertainty is the standard deviation over these and its own
            (`molflt.prediction.redraws` says what that is and is not). Each costs one more pass; 0 for none.
        dtype: precision. float32 is faster, and rounding then depends on the batch.
        displacements: whether to predict Δpos where the networks have a head for it, at a quarter of the time
            that energies take in large batches.

    Raises:
        InputError: the checkpoints' energies do not mean the same.

    Example:
        >>> predictor = Predictor.from_checkpoint("best.ckpt")  # doctest: +SKIP
        >>> predictor.predict([atoms])[0].energy  # doctest: +SKIP
    """

    def __init__(
        self,
        checkpoints: Checkpoint | Sequence[Checkpoint],
        device: torch.device | str = "cpu",
        *,
        redraws: int = DEFAULT_REDRAWS,
        dtype: torch.dtype = torch.float64,
        displacements: bool = True,
    ) -> None:
        if isinstance(checkpoints, Checkpoint):
            checkpoints = [checkpoints]
        if not checkpoints:
            raise ValueError("checkpoints is empty; give at least one")
        if redraws < 0:
            raise ValueError(f"redraws must be at least 0, got {redraws}")
        self.device = torch.device(device)
        self.energy_meaning = common_energy_meaning(checkpoints)
        self.domain = describe_training([checkpoint.metadata for checkpoint in checkpoints])
        number = redraws if len(checkpoints) == 1 else 0
        self._members = [
            Member(checkpoint, self.device, dtype, number, displacements) for checkpoint in checkpoints
        ]

    @classmethod
    def from_checkpoint(
        cls,
        path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        device: torch.device | str = "cpu",
        **settings: Any,
    ) -> Predictor:
        """Read checkpoints: a file, the name of a shipped one, or a list of these for an ensemble.

        `settings` are those of the class. Raises `InputError` where one is missing or not a checkpoint.
        """
        paths = [path] if isinstance(path, (str, os.PathLike)) else list(path)
        return cls([load_checkpoint(item) for item in paths], device, **settings)

    @property
    def radius(self) -> float:
        """How far the networks' graphs reach, Å: what to give `iter_inputs`, for speed alone."""
        return max(member.model.radius for member in self._members)

    @property
    def predicts_positions(self) -> bool:
        """Whether predictions have `delta_pos`: it is wanted, and all networks have a head for it."""
        return all(member.model.displacement_head is not None for member in self._members)

    def predict(self, structures: Iterable[Any], batch_size: int = DEFAULT_BATCH_SIZE) -> list[Prediction]:
        """Predict the energies of ASE `Atoms`, pymatgen structures or molecules, `Structure` or `Data`.

        The order is kept. Raises `InputError` for the first structure that can not be predicted.
        """
        if isinstance(structures, (str, os.PathLike)) or converter(structures) is not None:
            raise TypeError(f"structures is one {type(structures).__name__}; put it in a list")
        predictions: list[Prediction] = []
        converted = (
            as_structure(structure, number, self.radius) for number, structure in enumerate(structures)
        )
        for outcome in self.iter_predict(converted, batch_size):
            if isinstance(outcome, InputError):
                raise outcome
            predictions.append(outcome)
        return predictions

    def iter_predict(
        self, structures: Iterable[Structure | InputError], batch_size: int = DEFAULT_BATCH_SIZE
    ) -> Iterator[Prediction | InputError]:
        """Predict a stream of structures in order, `batch_size` at a time; errors in it pass through.

        Batches of large structures are closed earlier, so that memory is bounded by the largest one.
        """
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        waiting: list[_Prepared | InputError] = []
        ready, largest = 0, 0
        for structure in structures:
            item = self._prepare(structure)
            if not isinstance(item, InputError):
                largest = max(largest, len(item[0].data.atomic_numbers))
                if ready and largest * (ready + 1) > MAX_BATCH_ATOMS:
                    yield from self._predict_batch(waiting)
                    waiting, ready, largest = [], 0, len(item[0].data.atomic_numbers)
                ready += 1
            waiting.append(item)
            # An error that nothing waits before need not wait itself.
            if ready == batch_size or not ready:
                yield from self._predict_batch(waiting)
                waiting, ready, largest = [], 0, 0
        yield from self._predict_batch(waiting)

    def _prepare(self, structure: Structure | InputError) -> _Prepared | InputError:
        if isinstance(structure, InputError):
            return structure
        try:
            prepared = [member.prepare(structure) for member in self._members]
            # Predictions keep their structure; its neighbours would be most of their memory.
            return replace(structure, neighbors=None), prepared
        except InputError as error:
            return error

    def _predict_batch(self, items: Sequence[_Prepared | InputError]) -> Iterator[Prediction | InputError]:
        prepared = [item[1] for item in items if not isinstance(item, InputError)]
        outputs: Iterator[tuple[MemberOutput, ...]] = iter(())
        if prepared:
            by_member = zip(*prepared, strict=True)
            outputs = zip(
                *(member.predict(samples) for member, samples in zip(self._members, by_member, strict=True)),
                strict=True,
            )
        for item in items:
            yield item if isinstance(item, InputError) else finite(combine(item[0], next(outputs)))


def finite(prediction: Prediction) -> Prediction | StructureError:
    """The prediction, or an error in its place where its energy is NaN or infinite."""
    if math.isfinite(prediction.energy):
        return prediction
    reason = f"the predicted energy is {prediction.energy}; the structure or the checkpoint is at fault"
    return StructureError(prediction.source, prediction.frame, reason)


def combine(structure: Structure, outputs: Sequence[MemberOutput]) -> Prediction:
    """One prediction from what each network says of a structure."""
    energies = [output.energy for output in outputs]
    uncertainty, kind = outputs[0].redraw_std, "redraws"
    if len(outputs) > 1:
        uncertainty, kind = float(np.std(energies, ddof=1)), "ensemble"
    uncertainty_kind: UncertaintyKind = kind if uncertainty is not None else "none"
    unlike: dict[str, str] = {}
    for output in outputs:
        unlike = output.unlike | unlike
    moves = [output.delta_pos for output in outputs if output.delta_pos is not None]
    delta_pos = None
    if len(moves) == len(outputs):
        delta_pos = np.where(fixed_atoms(structure)[:, None], 0.0, np.mean(moves, axis=0))
    pbc, cell = structure.data.get("pbc"), structure.data.get("cell")
    periodic = [cell is not None] * 3 if pbc is None else pbc.reshape(3).tolist()
    return Prediction(
        energy=float(np.mean(energies)),
        formula=structure.formula,
        n_atoms=len(structure.data.atomic_numbers),
        source=structure.source,
        frame=structure.frame,
        id=structure_id(structure),
        tag_source=structure.tag_source,
        pbc="".join("T" if repeats else "F" for repeats in periodic),
        uncertainty=uncertainty,
        uncertainty_kind=uncertainty_kind,
        unlike_training=bool(unlike),
        notes=(*structure.notes, *unlike.values()),
        structure=structure,
        delta_pos=delta_pos,
    )


def describe_training(metadata: Sequence[CheckpointMetadata]) -> str:
    """What the networks were trained on, in a line; empty where the first checkpoint does not say."""
    first = metadata[0]
    if not first.elements or not first.num_atoms_range:
        return ""
    fewest, most = first.num_atoms_range
    sizes = f"{fewest} atoms" if fewest == most else f"{fewest} to {most} atoms"
    symbols = ", ".join(chemical_symbols[number] for number in first.elements)
    count = next(iter(first.splits.values()), None)
    systems = f"{count} systems" if count is not None else "systems"
    members = "" if len(metadata) == 1 else f"ensemble of {len(metadata)}, the first "
    return f"{members}trained on {systems} of {sizes}, of {symbols}; not for other kinds of system"
