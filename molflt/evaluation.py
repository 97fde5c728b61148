"""Scores of a checkpoint on labelled splits.

Energy MAE in eV and EwT (share of errors strictly below 0.02 eV) per split, each system counted once whatever
the batches, and the predictions they come from.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch_geometric.data import Dataset
from torch_geometric.loader import DataLoader

from molflt.build import build_dataset
from molflt.checkpoint import Checkpoint, load_checkpoint
from molflt.data.datasets import list_splits
from molflt.errors import InputError
from molflt.metrics import EnergyMAE, EnergyWithinThreshold
from molflt.models.graphormer3d import Graphormer3D


@dataclass(frozen=True)
class SplitScore:
    """How well a method does on a split."""

    method: str
    split: str
    energy_mae: float
    """eV."""
    ewt: float
    """Share of systems with an energy error strictly below 0.02 eV, 0 to 1."""
    num_systems: int


@dataclass(frozen=True)
class SplitPredictions:
    """Predicted and target energies of a split, eV, in the order of the data set."""

    sid: Tensor
    energy: Tensor
    target: Tensor


def evaluate(
    checkpoint: Checkpoint | str | os.PathLike[str],
    root: str | os.PathLike[str] | None = None,
    splits: Sequence[str] | None = None,
    batch_size: int | None = None,
) -> list[SplitScore]:
    """Score a checkpoint on labelled splits.

    checkpoint: a file, or one in memory; root: the data, by default what the checkpoint was trained on;
    splits: names, by default all under `root` but the training split; batch_size: by default the training's
    (it changes no result). Raises `InputError` for a file, split or label that is missing.
    """
    if not isinstance(checkpoint, Checkpoint):
        checkpoint = load_checkpoint(checkpoint)
    data = checkpoint.config.data
    data = replace(data, root=os.fspath(root or data.root), batch_size=batch_size or data.batch_size)
    if splits is None:
        splits = [split for split in list_splits(data.root) if split != data.train_split]
        if not splits:
            raise InputError(
                f"{data.root} holds no splits to score; give a data set or name one with --split"
            )
    datasets = [build_dataset(data, split, False) for split in splits]
    scores = []
    for split, dataset in zip(splits, datasets, strict=True):
        predictions = predict_split(checkpoint.model, dataset, data.batch_size)
        scores.append(score(predictions, method=checkpoint.config.model.attention.kind, split=split))
    return scores


def predict_split(model: Graphormer3D, dataset: Dataset, batch_size: int) -> SplitPredictions:
    """Energies of all systems of a labelled data set, computed where the model is."""
    sids, energies, targets = [], [], []
    device = model.energy_mean.device
    with torch.inference_mode():
        for batch in DataLoader(dataset, batch_size=batch_size):
            if batch.get("y_relaxed") is None:
                raise InputError(
                    f"sid {int(batch.sid[0])} has no y_relaxed; evaluate labelled splits, predict the others"
                )
            energies.append(model(batch.to(device)).energy.cpu())
            targets.append(batch.y_relaxed.cpu())
            sids.append(batch.sid.cpu())
    return SplitPredictions(torch.cat(sids), torch.cat(energies), torch.cat(targets))


def score(predictions: SplitPredictions, method: str, split: str) -> SplitScore:
    """Energy MAE and EwT of predictions."""
    mae, ewt = EnergyMAE(), EnergyWithinThreshold()
    mae.update(predictions.energy, predictions.target)
    ewt.update(predictions.energy, predictions.target)
    return SplitScore(method, split, float(mae.compute()), float(ewt.compute()), len(predictions.sid))
