"""Predicted and target energies of a split, each system once whatever the batches and processes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.data import Subset
from torch_geometric.data import Dataset
from torch_geometric.loader import DataLoader

from molflt.errors import InputError
from molflt.evaluation.ranks import shares
from molflt.models.graphormer3d import Graphormer3D


@dataclass(frozen=True)
class SplitPredictions:
    """Predicted and target energies of a split, eV, in the order of the data set."""

    sid: Tensor
    energy: Tensor
    target: Tensor


def predict_split(model: Graphormer3D, dataset: Dataset, batch_size: int) -> SplitPredictions:
    """Energies of all systems of a labelled data set, computed where the model is.

    Several processes (`molflt.evaluation.ranks`) share the work, and all get all energies.
    """

    def own(rank: int, size: int) -> tuple[Tensor, ...]:
        sids, energies, targets = [], [], []
        for batch, energy in predicted_batches(model, _share(dataset, rank, size), batch_size):
            if batch.get("y_relaxed") is None:
                raise InputError(
                    f"sid {int(batch.sid[0])} has no y_relaxed; evaluate labelled splits, predict the others"
                )
            energies.append(energy)
            targets.append(batch.y_relaxed.cpu())
            sids.append(batch.sid.cpu())
        return _joined(sids), _joined(energies), _joined(targets)

    return SplitPredictions(*_interleaved(shares(own)))


def predict_unlabelled(model: Graphormer3D, dataset: Dataset, batch_size: int) -> tuple[Tensor, Tensor]:
    """Ids and energies, eV, of all systems of a data set, without labels; shared as by `predict_split`."""

    def own(rank: int, size: int) -> tuple[Tensor, ...]:
        sids, energies = [], []
        for batch, energy in predicted_batches(model, _share(dataset, rank, size), batch_size):
            sids.append(batch.sid.cpu())
            energies.append(energy)
        return _joined(sids), _joined(energies)

    sids, energies = _interleaved(shares(own))
    return sids, energies


def mean_predictions(members: Sequence[SplitPredictions]) -> SplitPredictions:
    """The ensemble's energies: the mean over members, which hold the same systems in the same order."""
    first = members[0]
    energy = torch.stack([member.energy.double() for member in members]).mean(dim=0)
    return SplitPredictions(first.sid, energy if len(members) > 1 else first.energy, first.target)


def joined_predictions(parts: Sequence[SplitPredictions]) -> SplitPredictions:
    """Several splits as one."""
    return SplitPredictions(
        *(_joined([getattr(part, name) for part in parts]) for name in ("sid", "energy", "target"))
    )


def selected(predictions: SplitPredictions, rows: Sequence[int]) -> SplitPredictions:
    """Some of the systems."""
    index = torch.as_tensor(rows, dtype=torch.int64)
    return SplitPredictions(predictions.sid[index], predictions.energy[index], predictions.target[index])


def predicted_batches(model: Graphormer3D, dataset: Any, batch_size: int) -> Iterator[tuple[Any, Tensor]]:
    """Batches of a data set with the energies [B] that the model finds for them.

    Raises `InputError` where an energy is NaN or infinite.
    """
    device = model.energy_mean.device
    with torch.inference_mode():
        for batch in DataLoader(dataset, batch_size=batch_size):
            energy = model(batch.to(device)).energy.cpu()
            bad = (~torch.isfinite(energy)).nonzero()
            if len(bad):
                row = int(bad[0])
                raise InputError(
                    f"the predicted energy of sid {int(batch.sid[row])} is {float(energy[row])}; use another "
                    "checkpoint, or correct the record if others have finite energies"
                )
            yield batch, energy


def _share(dataset: Dataset, rank: int, size: int) -> Any:
    """Every `size`-th system from `rank` on."""
    return dataset if size == 1 else Subset(cast("Any", dataset), range(rank, len(dataset), size))


def _interleaved(parts: Sequence[tuple[Tensor, ...]]) -> list[Tensor]:
    """Columns of all systems, in the order of the data set, from those of each share."""
    columns = []
    for column in zip(*parts, strict=True):
        whole = column[0].new_empty(sum(map(len, column)))
        for rank, part in enumerate(column):
            whole[rank :: len(parts)] = part
        columns.append(whole)
    return columns


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(parts)) if parts else torch.zeros(0)
