"""Checkpoints on labelled splits: each one's scores, their mean, their ensemble's, and breakdowns."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch_geometric.data import Data

from molflt.build import build_dataset
from molflt.checkpoint import Checkpoint, common_energy_meaning, load_checkpoint
from molflt.data.datasets import OC20IS2RE, find_split, list_splits
from molflt.errors import InputError
from molflt.evaluation.predictions import (
    SplitPredictions,
    joined_predictions,
    mean_predictions,
    predict_split,
    selected,
)
from molflt.evaluation.scores import EWT_THRESHOLD, METRICS, RESAMPLES, SplitScore, score
from molflt.evaluation.systems import System, describe_systems, grouped

OVERALL = "overall"

Source = Checkpoint | str | os.PathLike[str]


@dataclass(frozen=True)
class Evaluation:
    """Scores, and the predictions that they are made of."""

    root: str
    """Where the data are."""
    energy_meaning: str
    threshold: float
    """Of EwT, eV."""
    scores: list[SplitScore]
    """Per checkpoint and split; with several splits `overall`, over all their systems; with several
    checkpoints their mean and the ensemble's own score."""
    breakdown: list[SplitScore]
    """Per split and group, of the ensemble where there are several checkpoints."""
    predictions: dict[str, SplitPredictions]
    """Split to energies, the mean over the checkpoints."""
    members: dict[str, list[SplitPredictions]]
    """Split to energies of each checkpoint."""
    systems: dict[str, list[System]] = field(repr=False)
    """Split to what its systems are; empty unless asked for."""


def evaluate(
    checkpoint: Source,
    root: str | os.PathLike[str] | None = None,
    splits: Sequence[str] | None = None,
    batch_size: int | None = None,
) -> list[SplitScore]:
    """Score one checkpoint, a row per split without intervals; arguments as in `evaluate_checkpoints`."""
    return evaluate_checkpoints([checkpoint], root, splits, batch_size, overall=False, resamples=0).scores


def evaluate_checkpoints(
    checkpoints: Sequence[Source],
    root: str | os.PathLike[str] | None = None,
    splits: Sequence[str] | None = None,
    batch_size: int | None = None,
    *,
    threshold: float = EWT_THRESHOLD,
    by: Sequence[str] = (),
    with_systems: bool = False,
    overall: bool = True,
    resamples: int = RESAMPLES,
    device: torch.device | str | None = None,
) -> Evaluation:
    """Score checkpoints on labelled splits, each system once.

    Networks run in the precision of their weights, float32 as a rule: other batches, and another number of
    processes, change energies by less than 1e-5 eV.

    Args:
        checkpoints: files, shipped names or checkpoints in memory, such as seeds of one training.
        root: the data, by default what the first checkpoint was trained on.
        splits: names, by default all under `root` but the training split.
        batch_size: by default the training's.
        threshold: of EwT, eV.
        by: keys of `GROUPINGS` to break the scores down by.
        with_systems: also without `by`, describe the systems (it means reading the data once more).
        overall: with several splits, also score all their systems together.
        resamples: of the bootstrap for the 95 % intervals; 0 for none.
        device: where to compute; by default where the networks are, the CPU for those read from files.

    Raises:
        InputError: a file, split or label is missing, an energy is not finite, or the checkpoints' energies
            do not mean the same.
    """
    loaded = [_loaded(item, device) for item in checkpoints]
    meaning = common_energy_meaning(loaded)
    first = loaded[0].config.data
    place = os.fspath(root or first.root)
    splits = default_splits(place, first.train_split) if splits is None else list(dict.fromkeys(splits))
    datasets = [
        [build_dataset(replace(checkpoint.config.data, root=place), split, False) for checkpoint in loaded]
        for split in splits
    ]
    members = {
        split: [
            predict_split(checkpoint.model, dataset, batch_size or first.batch_size)
            for checkpoint, dataset in zip(loaded, per_checkpoint, strict=True)
        ]
        for split, per_checkpoint in zip(splits, datasets, strict=True)
    }
    predictions = {split: mean_predictions(parts) for split, parts in members.items()}
    systems = {}
    if by or with_systems:
        systems = {split: describe_systems(_records(OC20IS2RE(place, split))) for split in splits}
    kinds = [checkpoint.config.model.attention.kind for checkpoint in loaded]
    names = kinds if len(loaded) == 1 else [_name(*pair) for pair in zip(checkpoints, kinds, strict=True)]
    scored = _with_overall(members, predictions, overall and len(splits) > 1)
    scores = []
    for number, name in enumerate(names):
        for split, (parts, _) in scored.items():
            scores.append(score(parts[number], name, split, threshold, resamples))
    if len(loaded) > 1:
        scores += [_mean_score(scores, split, len(loaded)) for split in scored]
        for split, (_, mean) in scored.items():
            scores.append(score(mean, f"ensemble of {len(loaded)}", split, threshold, resamples))
    method = names[0] if len(loaded) == 1 else f"ensemble of {len(loaded)}"
    breakdown = [
        score(selected(predictions[split], rows), method, split, threshold, resamples, f"{grouping}={group}")
        for grouping in by
        for split in splits
        for group, rows in grouped(systems[split], grouping).items()
    ]
    return Evaluation(place, meaning, threshold, scores, breakdown, predictions, members, systems)


def _loaded(source: Source, device: torch.device | str | None) -> Checkpoint:
    """A checkpoint with its network on the device; one in memory stays where it is itself."""
    checkpoint = source if isinstance(source, Checkpoint) else load_checkpoint(source)
    return checkpoint if device is None else replace(checkpoint, model=deepcopy(checkpoint.model).to(device))


def default_splits(root: str, train_split: str) -> list[str]:
    """All splits under `root` but the training split; `InputError` where there is none."""
    splits = [split for split in list_splits(find_split(root, None)) if split != train_split]
    if Path(root).is_file():
        raise InputError(
            f"{root} is a file; give the folder whose LMDBs are the splits (molflt data convert makes them)"
        )
    if not splits:
        raise InputError(f"{root} holds no splits to score; give a data set or name one with --split")
    return splits


def _with_overall(
    members: dict[str, list[SplitPredictions]], predictions: dict[str, SplitPredictions], overall: bool
) -> dict[str, tuple[list[SplitPredictions], SplitPredictions]]:
    scored = {split: (parts, predictions[split]) for split, parts in members.items()}
    if overall:
        number = len(next(iter(members.values())))
        pooled = [joined_predictions([parts[index] for parts in members.values()]) for index in range(number)]
        scored[OVERALL] = (pooled, joined_predictions(list(predictions.values())))
    return scored


def _mean_score(scores: Sequence[SplitScore], split: str, number: int) -> SplitScore:
    """Mean and standard deviation (n - 1) of each metric over the checkpoints' rows of one split."""
    rows = [row for row in scores if row.split == split][:number]
    values = {name: np.array([getattr(row, name) for row in rows]) for name in METRICS}
    means: dict[str, Any] = {name: float(column.mean()) for name, column in values.items()}
    return SplitScore(
        method=f"mean of {number}",
        split=split,
        num_systems=rows[0].num_systems,
        threshold=rows[0].threshold,
        stds={name: float(column.std(ddof=1)) for name, column in values.items()},
        **means,
    )


def _records(dataset: OC20IS2RE) -> Iterator[Data]:
    for index in range(len(dataset)):
        yield dataset.get(index)


def _name(source: Source, kind: str) -> str:
    return kind if isinstance(source, Checkpoint) else os.fspath(source)
