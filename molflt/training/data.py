"""What training reads: samples kept ready in memory where they fit, and the statistics of a split."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor
from torch_geometric.data import Data

from molflt.errors import InputError, InputWarning
from molflt.models.references import ReferenceFit

TOTAL_ENERGY_BELOW = -50.0
"""eV per system."""
COARSE_LABEL = 0.002
"""eV; a tenth of the error that OC20's EwT allows."""


def cached(dataset: Sequence[Data], limit_bytes: float, probe: int = 32) -> Sequence[Data]:
    """The samples in memory, as read and transformed, or the dataset where they would exceed `limit_bytes`.

    From memory an epoch neither reads files nor builds graphs. The size is estimated from `probe` samples
    spread over the dataset. For samples that are the same each time they are read.
    """
    count = len(dataset)
    if count == 0 or limit_bytes <= 0:
        return dataset
    probed = range(0, count, max(count // probe, 1))
    mean_bytes = sum(sample_bytes(dataset[index]) for index in probed) / len(probed)
    return dataset if mean_bytes * count > limit_bytes else [dataset[index] for index in range(count)]


def sample_bytes(sample: Data) -> int:
    """Memory of a sample's tensors."""
    return sum(value.nbytes for value in sample.to_dict().values() if isinstance(value, Tensor))


@dataclass(frozen=True)
class SplitStatistics:
    """Size, chemistry and scale of a split's samples."""

    num_systems: int
    elements: list[int]
    """Atomic numbers that occur, ascending."""
    num_atoms_range: list[int]
    """Atoms of the smallest and the largest system."""
    energy_mean: float
    """Mean of y_relaxed less its element references, eV."""
    energy_std: float
    """Standard deviation of the same over the split, eV; 1 where all are equal."""
    delta_pos_std: float
    """Root mean square of Δpos' components over free atoms, Å; 1 where nothing moves or is known to."""


def measure_statistics(
    samples: Iterable[Data], split: str, with_delta_pos: bool, references: Tensor | None = None
) -> SplitStatistics:
    """Measure a split in one pass, in float64 (energies by Welford's update).

    samples carry `y_relaxed`, `atomic_numbers` and, if `with_delta_pos`, `delta_pos`; those without `fixed`
    count as free throughout. From y_relaxed the element `references` [119], eV, are taken away first. Raises
    `InputError` for an empty split, a missing or non-finite label.
    """
    count, mean, squares = 0, 0.0, 0.0
    elements: set[int] = set()
    fewest, most = math.inf, 0
    shift_squares, shift_count = 0.0, 0
    for sample in samples:
        energy = _label(sample, split)
        if references is not None:
            energy -= float(references[sample.atomic_numbers].sum())
        count += 1
        step = energy - mean
        mean += step / count
        squares += step * (energy - mean)
        elements.update(sample.atomic_numbers.tolist())
        num_atoms = len(sample.atomic_numbers)
        fewest, most = min(fewest, num_atoms), max(most, num_atoms)
        if with_delta_pos:
            shift = _free_delta_pos(sample, split)
            shift_squares += float(shift.double().square().sum())
            shift_count += shift.numel()
    if count == 0:
        raise InputError(f"split {split!r} is empty; training needs at least one system in it")
    return SplitStatistics(
        num_systems=count,
        elements=sorted(elements),
        num_atoms_range=[int(fewest), int(most)],
        energy_mean=mean,
        energy_std=math.sqrt(squares / count) or 1.0,
        delta_pos_std=math.sqrt(shift_squares / shift_count) or 1.0 if shift_count else 1.0,
    )


def fit_references(samples: Iterable[Data], split: str) -> Tensor:
    """Energies per element [119], eV, that explain the split's targets best (`ReferenceFit`).

    Raises `InputError` for an empty split, a missing or non-finite label. Warns (`InputWarning`) where
    targets are so large that their float32 is coarse.
    """
    fit, count, largest = ReferenceFit(), 0, 0.0
    for sample in samples:
        energy = _label(sample, split)
        fit.add(sample.atomic_numbers, energy)
        largest = max(largest, abs(energy))
        count += 1
    if count == 0:
        raise InputError(f"split {split!r} is empty; training needs at least one system in it")
    spacing = float(np.spacing(np.float32(largest)))
    if spacing > COARSE_LABEL:
        _warn(
            f"targets of split {split!r} reach {largest:.0f} eV, where the data's float32 has steps of "
            f"{spacing:.2g} eV; subtract an energy per element before writing the data set"
        )
    return fit.solve()


def warn_of_total_energies(energy_mean: float, split: str) -> None:
    """An `InputWarning` where the mean of the targets, eV, is far below any adsorption energy."""
    if energy_mean < TOTAL_ENERGY_BELOW:
        _warn(
            f"the targets of split {split!r} are {energy_mean:.1f} eV per system on average: these look like "
            "total energies, and relaxed-energy models are meant for adsorption energies, E(slab with "
            "adsorbate) - E(slab) - E(adsorbate in the gas), a few eV each; train on those, or add "
            "--data.element_references true, which fits an energy per element, trains on what is left and "
            "predicts total energies"
        )


@rank_zero_only
def _warn(text: str) -> None:
    warnings.warn(text, InputWarning, stacklevel=4)


def check_labels(samples: Iterable[Data], split: str) -> int:
    """Number of samples, each checked to carry a finite target.

    Raises `InputError` for an empty split and for the first sample without one.
    """
    count = sum(1 for sample in samples if math.isfinite(_label(sample, split)))
    if count == 0:
        raise InputError(f"split {split!r} is empty; validation needs at least one system in it")
    return count


def _label(sample: Data, split: str) -> float:
    energy = sample.get("y_relaxed")
    if energy is None:
        raise InputError(
            f"{_name(sample, split)} has no y_relaxed; train and validate on labelled splits only"
        )
    if not torch.isfinite(energy).all():
        raise InputError(
            f"{_name(sample, split)} has y_relaxed = {energy.item()}; remove or mend this record"
        )
    return float(energy)


def _free_delta_pos(sample: Data, split: str) -> Tensor:
    delta_pos = sample.get("delta_pos")
    if delta_pos is None:
        raise InputError(
            f"{_name(sample, split)} has no pos_relaxed, which the Δpos loss needs; "
            "set optim.delta_pos_weight to [0, 0] to train on energies alone"
        )
    fixed = sample.get("fixed")
    return delta_pos if fixed is None else delta_pos[~fixed]


def _name(sample: Data, split: str) -> str:
    sid = sample.get("sid")
    return f"sid {int(sid)} of split {split!r}" if sid is not None else f"a record of split {split!r}"
