"""What is said of predictions against targets, and within which bounds.

With errors e_i = energy_i - target_i over n systems,

    MAE = mean |e|,  MSE = mean e^2,  RMSE = sqrt(MSE),  EwT = share with |e| < threshold,
    R^2 = 1 - sum e^2 / sum (target - mean target)^2,  Spearman = correlation of the ranks.

Intervals are percentile bootstrap intervals (Efron & Tibshirani 1993, ch. 13): systems are drawn with
replacement from a seeded generator. They show what the choice of test systems does, not what another training
seed would do. Ranks are those of the whole split; ranking each resample anew would change them little and
cost most of the time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import rankdata

from molflt.evaluation.predictions import SplitPredictions
from molflt.metrics import absolute_error

METRICS = ("energy_mae", "energy_mse", "energy_rmse", "ewt", "r2", "spearman")
EWT_THRESHOLD = 0.02
"""eV, as OC20 has it."""
RESAMPLES = 1000
LEVEL = 0.95
_CHUNK = 2**22


@dataclass(frozen=True)
class SplitScore:
    """How well a method does on a split, or on one group of its systems."""

    method: str
    split: str
    energy_mae: float
    """eV."""
    ewt: float
    """Share of systems with an energy error strictly below `threshold`, 0 to 1."""
    num_systems: int
    energy_mse: float = math.nan
    """eV²."""
    energy_rmse: float = math.nan
    """eV."""
    r2: float = math.nan
    """NaN where all targets are equal."""
    spearman: float = math.nan
    """NaN where all targets or all energies are equal."""
    threshold: float = EWT_THRESHOLD
    """eV."""
    intervals: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Metric to its 95 % bootstrap interval; empty where none was asked for."""
    stds: dict[str, float] = field(default_factory=dict)
    """Metric to its standard deviation over checkpoints, where the values are means over them."""
    group: str = ""
    """`<grouping>=<group>` of a breakdown, such as `metal=Pd`."""


def score(
    predictions: SplitPredictions,
    method: str,
    split: str,
    threshold: float = EWT_THRESHOLD,
    resamples: int = 0,
    group: str = "",
) -> SplitScore:
    """Score predictions; with bootstrap intervals from `resamples` > 0.

    Raises:
        ValueError: energies and targets differ in shape, or `threshold` is not positive.
    """
    # Refuses (N,) against (N, 1), which would be compared all with all.
    absolute_error(predictions.energy, predictions.target)
    energy, target = (
        tensor.detach().to("cpu", torch.float64).numpy().reshape(-1)
        for tensor in (predictions.energy, predictions.target)
    )
    values: dict[str, Any] = energy_scores(energy, target, threshold)
    intervals = bootstrap_intervals(energy, target, threshold, resamples) if resamples else {}
    return SplitScore(
        method=method,
        split=split,
        num_systems=len(energy),
        threshold=threshold,
        intervals=intervals,
        group=group,
        **values,
    )


def energy_scores(
    energy: NDArray[np.float64], target: NDArray[np.float64], threshold: float = EWT_THRESHOLD
) -> dict[str, float]:
    """All of `METRICS` for energies and targets [n], eV."""
    if not threshold > 0:
        raise ValueError(f"threshold must be positive, got {threshold}; OC20's EwT has 0.02 eV")
    rows = np.arange(len(energy))[None]
    return {name: float(values[0]) for name, values in _resampled(energy, target, threshold, rows).items()}


def bootstrap_intervals(
    energy: NDArray[np.float64],
    target: NDArray[np.float64],
    threshold: float = EWT_THRESHOLD,
    resamples: int = RESAMPLES,
    level: float = LEVEL,
    seed: int = 0,
) -> dict[str, tuple[float, float]]:
    """Metric to (lower, upper) of its percentile bootstrap interval, NaN where the metric is."""
    generator = np.random.default_rng(seed)
    number = len(energy)
    parts: list[dict[str, NDArray[np.float64]]] = []
    done = 0
    while done < resamples:
        size = min(max(_CHUNK // number, 1), resamples - done)
        rows = generator.integers(number, size=(size, number), dtype=np.int64)
        parts.append(_resampled(energy, target, threshold, rows))
        done += size
    tail = 50.0 * (1.0 - level)
    intervals = {}
    for name in METRICS:
        values = np.concatenate([part[name] for part in parts])
        # A resample of few systems can hold one of them only, for which no correlation exists.
        values = values[~np.isnan(values)]
        low, high = np.percentile(values, [tail, 100.0 - tail]) if len(values) else (math.nan, math.nan)
        intervals[name] = (float(low), float(high))
    return intervals


def _resampled(
    energy: NDArray[np.float64], target: NDArray[np.float64], threshold: float, rows: NDArray[np.int64]
) -> dict[str, NDArray[np.float64]]:
    """Metrics [resamples] of the systems `rows` [resamples, n]."""
    errors = (energy - target)[rows]
    absolute, squares = np.abs(errors), errors**2
    picked = target[rows]
    spread = ((picked - picked.mean(axis=1, keepdims=True)) ** 2).sum(axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        r2 = np.where(spread > 0, 1.0 - squares.sum(axis=1) / spread, math.nan)
        spearman = _correlation(rankdata(energy)[rows], rankdata(target)[rows])
    mse = squares.mean(axis=1)
    return {
        "energy_mae": absolute.mean(axis=1),
        "energy_mse": mse,
        "energy_rmse": np.sqrt(mse),
        "ewt": (absolute < threshold).mean(axis=1),
        "r2": r2,
        "spearman": spearman,
    }


def _correlation(x: NDArray[np.float64], y: NDArray[np.float64]) -> NDArray[np.float64]:
    x = x - x.mean(axis=1, keepdims=True)
    y = y - y.mean(axis=1, keepdims=True)
    norms = np.sqrt((x**2).sum(axis=1) * (y**2).sum(axis=1))
    return np.where(norms > 0, (x * y).sum(axis=1) / norms, math.nan)
