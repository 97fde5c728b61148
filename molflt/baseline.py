"""The plain method that a model has to beat on `datasets/fcc111`: ridge regression on labels alone.

    E ~ intercept + one-hot(metal) . a + one-hot(adsorbate) . b + one-hot(number of adsorbates) . c
          + one-hot(site) . d

The target is the total adsorption energy, eV, as for the models; a second form fits the energy per adsorbate
and multiplies it by their number, which helps a method that can only add. The penalty is the one with
the lowest leave-one-out error on the training split. A metal or adsorbate that training never saw has no
column, so that on the out-of-distribution splits only the rest of the labels speaks.
"""

from __future__ import annotations

import os

import numpy as np
import torch
from numpy.typing import NDArray

from molflt.data.datasets import OC20IS2RE, list_splits
from molflt.errors import InputError
from molflt.evaluation import SplitPredictions, SplitScore, score

PENALTIES = tuple(10.0**exponent for exponent in range(-4, 4))
TOTAL = "ridge on one-hots"
PER_ADSORBATE = "ridge, per adsorbate"
NUMBER = 2
"""Column of the number of adsorbates in `decode_sid`."""


def evaluate_fcc111_baseline(root: str | os.PathLike[str], train_split: str = "train") -> list[SplitScore]:
    """Fit on the training split of an fcc111 data set and score all others, both forms of the method.

    Raises `InputError` where the data are missing.
    """
    train_labels, train_energy, _ = _read(root, train_split)
    categories = [np.unique(column) for column in train_labels.T]
    train_features = one_hot(train_labels, categories)
    total = fit_ridge(train_features, train_energy)
    single = fit_ridge(train_features, train_energy / train_labels[:, NUMBER])
    scores: dict[str, list[SplitScore]] = {TOTAL: [], PER_ADSORBATE: []}
    for split in list_splits(root):
        if split == train_split:
            continue
        labels, energy, sid = _read(root, split)
        features = one_hot(labels, categories)
        for method, predicted in (
            (TOTAL, features @ total[0] + total[1]),
            (PER_ADSORBATE, (features @ single[0] + single[1]) * labels[:, NUMBER]),
        ):
            predictions = SplitPredictions(torch.tensor(sid), torch.tensor(predicted), torch.tensor(energy))
            scores[method].append(score(predictions, method, split))
    return [row for rows in scores.values() for row in rows]


def decode_sid(sid: NDArray[np.int64]) -> NDArray[np.int64]:
    """Labels [n, 4] (metal, adsorbate, number of adsorbates, site) of fcc111's ids, such as 780621.

    The digits are the metal's and the adsorbate's atomic numbers, the site and the number.
    """
    return np.stack([sid // 10000, sid // 100 % 100, sid % 10, sid // 10 % 10], axis=1)


def one_hot(labels: NDArray[np.int64], categories: list[NDArray[np.int64]]) -> NDArray[np.float64]:
    """Indicator columns [n, sum of categories] of labels [n, k]; all zero for a label in no category."""
    columns = [labels[:, [number]] == values for number, values in enumerate(categories)]
    return np.concatenate(columns, axis=1).astype(np.float64)


def fit_ridge(
    features: NDArray[np.float64], target: NDArray[np.float64], penalties: tuple[float, ...] = PENALTIES
) -> tuple[NDArray[np.float64], float]:
    """Coefficients and (unpenalised) intercept with the penalty of lowest leave-one-out squared error.

    The leave-one-out residual is r_i / (1 - h_ii), with the hat matrix h of the centred problem plus 1/n
    (Golub, Heath & Wahba, Technometrics 21, 215 (1979)).
    """
    mean, offset = features.mean(axis=0), float(target.mean())
    left, singular, right = np.linalg.svd(features - mean, full_matrices=False)
    projected = left.T @ (target - offset)

    def leave_one_out(penalty: float) -> float:
        shrinkage = singular**2 / (singular**2 + penalty)
        residual = target - offset - left @ (shrinkage * projected)
        leverage = (left**2 @ shrinkage) + 1.0 / len(target)
        return float(np.mean((residual / (1.0 - leverage)) ** 2))

    penalty = min(penalties, key=leave_one_out)
    coefficients = right.T @ (singular / (singular**2 + penalty) * projected)
    return coefficients, offset - float(mean @ coefficients)


def _read(
    root: str | os.PathLike[str], split: str
) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.int64]]:
    samples = list(OC20IS2RE(root, split))
    sid = np.array([int(sample.sid) for sample in samples])
    labels = decode_sid(sid)
    for sample, (_, adsorbate, number, _) in zip(samples, labels, strict=True):
        if sample.atomic_numbers[sample.tags == 2].tolist() != [adsorbate] * number:
            raise InputError(
                f"sid {int(sample.sid)} in {root} is no id of fcc111; give a folder with that data set"
            )
    return labels, np.array([float(sample.y_relaxed) for sample in samples]), sid
