"""What training reads: samples kept ready in memory where they fit, and the statistics of its splits."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, cast

import numpy as np
import torch
from ase.data import atomic_numbers
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor
from torch_geometric.data import Data

from molflt.config import Config
from molflt.data.datasets import OC20IS2RE, find_split
from molflt.data.sizes import KEEP_FROM
from molflt.data.statistics import DataStatistics, Moments, dataset_statistics
from molflt.errors import InputError, InputWarning
from molflt.models.references import ReferenceFit
from molflt.terminal import tracked

TOTAL_ENERGY_BELOW = -50.0
"""eV per system."""
COARSE_LABEL = 0.002
"""eV; a tenth of the error that OC20's EwT allows."""


def cached(
    dataset: Sequence[Data], limit_bytes: float, text: str | None = None, probe: int = 32
) -> Sequence[Data]:
    """The samples in memory, as read and transformed, or the dataset where they would exceed `limit_bytes`.

    From memory an epoch neither reads files nor builds graphs. The size is estimated from `probe` samples
    spread over the dataset. For samples that are the same each time they are read. How far that has come is
    shown on stderr under `text`.
    """
    count = len(dataset)
    if count == 0 or limit_bytes <= 0:
        return dataset
    probed = range(0, count, max(count // probe, 1))
    mean_bytes = sum(sample_bytes(dataset[index]) for index in probed) / len(probed)
    if mean_bytes * count > limit_bytes:
        return dataset
    indices = range(count)
    return [dataset[index] for index in (tracked(indices, count, text) if text else indices)]


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


@dataclass(frozen=True)
class DataFit:
    """What a run takes from its data before it starts, and keeps to be continued with."""

    splits: dict[str, int]
    """Systems of each split."""
    train: SplitStatistics
    references: Tensor | None
    """Energy per element [119], eV, where targets have one taken away."""
    source: str = ""
    """Where it comes from, in words."""

    def state(self) -> dict[str, Any]:
        """Plain values and tensors, for `data_fit_from_state`."""
        return {"splits": self.splits, "train": asdict(self.train), "references": self.references}


def data_fit_from_state(state: Mapping[str, Any]) -> DataFit:
    """What `DataFit.state` gave."""
    return DataFit(
        dict(state["splits"]), SplitStatistics(**state["train"]), state["references"], "kept with the run"
    )


def fit_data(config: Config, train_set: Sequence[Data], progress: bool = False) -> DataFit:
    """Read all records of a run's splits once, without making graphs, or take what is kept beside them.

    `molflt data stats` keeps its numbers beside each LMDB file, with the fingerprint of the content that they
    are of; so does this for large files (`molflt.data.sizes.KEEP_FROM`). Element references are fitted in a
    second reading.

    Args:
        config: of the run.
        train_set: its training samples, for the element references; they are read again if not in memory.
        progress: show on stderr how far reading has come.

    Raises:
        InputError: a record without what training needs of it, with other fields than the others, or damaged.
    """
    data, with_delta_pos = config.data, any(config.optim.delta_pos_weight)
    measured, sources = {}, []
    for split in dict.fromkeys((data.train_split, *data.val_splits)):
        path = find_split(data.root, split)
        measured[split] = dataset_statistics(path, progress, keep_from=KEEP_FROM)
        check_fields(measured[split], split, with_delta_pos and split == data.train_split)
        sources.append(f"{split} {_source(measured[split])}")
    references, targets = None, measured[data.train_split].moments["y_relaxed"]
    if data.element_references:
        samples = train_set if isinstance(train_set, list) else OC20IS2RE(data.root, data.train_split)
        samples = cast("Sequence[Data]", samples)
        stream = tracked(samples, len(samples), "Reading energies") if progress else samples
        references, targets = fit_references(stream, data.train_split)
    statistics = split_statistics(measured[data.train_split], targets)
    counts = {split: found.records for split, found in measured.items()}
    return DataFit(counts, statistics, references, "; ".join(sources))


def _source(statistics: DataStatistics) -> str:
    count, read = statistics.records, statistics.read
    if read == count:
        return f"measured on {count} systems"
    return f"as kept beside the data, {count} systems" + (f" ({read} of them measured anew)" if read else "")


def check_fields(statistics: DataStatistics, split: str, with_delta_pos: bool = False) -> None:
    """Raise `InputError` unless all systems have `y_relaxed`, and the same fields.

    With `with_delta_pos` they also have to have `pos_relaxed`.
    """
    remedies = {"y_relaxed": "train and validate on labelled splits only"}
    if with_delta_pos:
        remedies["pos_relaxed"] = (
            "the Δpos loss needs it: set optim.delta_pos_weight to [0, 0] to train on energies alone"
        )
    counts, total = statistics.field_systems, statistics.records
    for name, remedy in remedies.items():
        if counts[name] < total:
            without = f"{total - counts[name]} of {total} systems of split {split!r} have no {name}"
            raise InputError(f"{without if counts[name] else f'split {split!r} has no {name}'}; {remedy}")
    for name, count in counts.items():
        if count < total:
            raise InputError(
                f"{count} of {total} systems of split {split!r} have {name} and the others do not; the "
                "records of a data set carry the same fields: make one set for each kind"
            )


def split_statistics(statistics: DataStatistics, targets: Moments) -> SplitStatistics:
    """What training needs of a split's statistics.

    Args:
        statistics: of its records.
        targets: of y_relaxed less its element references.
    """
    atoms, shifts = statistics.moments["atoms"], statistics.moments.get("delta_pos", Moments())
    return SplitStatistics(
        num_systems=statistics.records,
        elements=sorted(atomic_numbers[symbol] for symbol in statistics.element_atoms),
        num_atoms_range=[int(atoms.min), int(atoms.max)],
        energy_mean=targets.mean,
        energy_std=targets.std or 1.0,
        delta_pos_std=shifts.rms or 1.0 if shifts.n else 1.0,
    )


def fit_references(samples: Iterable[Data], split: str) -> tuple[Tensor, Moments]:
    """Energies per element [119], eV, that explain the split's targets best, and what they leave of them.

    The samples are read once; their compositions and energies stay in memory meanwhile. Warns
    (`InputWarning`) where targets are so large that their float32 is coarse.
    """
    fit, kept, rests = ReferenceFit(), [], Moments()
    for sample in samples:
        numbers, energy = sample["atomic_numbers"], float(sample["y_relaxed"])
        fit.add(numbers, energy)
        kept.append((numbers.to(torch.uint8), energy))
    largest = max(abs(energy) for _, energy in kept)
    spacing = float(np.spacing(np.float32(largest)))
    if spacing > COARSE_LABEL:
        _warn(
            f"targets of split {split!r} reach {largest:.0f} eV, where the data's float32 has steps of "
            f"{spacing:.2g} eV; subtract an energy per element before writing the data set"
        )
    references = fit.solve()
    rests.add([energy - float(references[numbers.long()].sum()) for numbers, energy in kept])
    return references, rests


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
