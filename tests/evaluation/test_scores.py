"""Metrics by hand and against SciPy, and intervals against what sampling theory says."""

import math

import numpy as np
import pytest
import torch
from scipy import stats

from molflt.evaluation import METRICS, SplitPredictions, bootstrap_intervals, energy_scores, score


def test_metrics_by_hand():
    """Errors 1, -1, 2, 0 and targets 0, 2, 4, 6."""
    values = energy_scores(np.array([1.0, 1.0, 6.0, 6.0]), np.array([0.0, 2.0, 4.0, 6.0]), 1.0)
    assert values["energy_mae"] == 1.0
    assert values["energy_mse"] == 1.5
    assert values["energy_rmse"] == math.sqrt(1.5)
    assert values["ewt"] == 0.25, "an error of exactly the threshold is not within it"
    assert values["r2"] == 1.0 - 6.0 / 20.0
    assert values["spearman"] == pytest.approx(8 / math.sqrt(4 * 20), abs=1e-12)
    assert set(values) == set(METRICS)


def test_rank_correlation_and_r2_are_the_usual_ones():
    """SciPy's Spearman with ties, and R² of 101 random systems; R² is negative for a bad enough model."""
    generator = np.random.default_rng(0)
    target = np.round(generator.normal(size=101), 1)
    energy = np.round(target + generator.normal(size=101), 1)
    values = energy_scores(energy, target)
    assert values["spearman"] == pytest.approx(stats.spearmanr(energy, target).statistic, abs=1e-12)
    assert values["r2"] == pytest.approx(1 - ((energy - target) ** 2).mean() / target.var(), abs=1e-12)
    assert energy_scores(-3 * target, target)["r2"] < -1


def test_what_is_not_defined_is_nan():
    """R² and rank correlation of one system, and of equal targets or energies."""
    one = energy_scores(np.array([1.0]), np.array([2.0]))
    assert (one["energy_mae"], one["energy_rmse"]) == (1.0, 1.0)
    assert math.isnan(one["r2"])
    assert math.isnan(one["spearman"])
    equal = energy_scores(np.array([1.0, 1.0]), np.array([1.0, 2.0]))
    assert equal["r2"] == -1.0
    assert math.isnan(equal["spearman"])


def test_intervals_of_a_mean_are_those_of_sampling_theory():
    """MAE of 997 systems: the mean plus and minus 1.96 standard errors, to 5 % of the width."""
    generator = np.random.default_rng(1)
    target = generator.normal(size=997)
    energy = target + generator.normal(size=997)
    errors = np.abs(energy - target)
    low, high = bootstrap_intervals(energy, target, resamples=4000)["energy_mae"]
    half = 1.96 * errors.std(ddof=1) / math.sqrt(997)
    assert low == pytest.approx(errors.mean() - half, abs=0.1 * half)
    assert high == pytest.approx(errors.mean() + half, abs=0.1 * half)


def test_every_interval_covers_its_metric_and_is_reproducible():
    """The same numbers for the same seed, in chunks or at once; others for another seed."""
    generator = np.random.default_rng(2)
    target = generator.normal(size=53)
    energy = target + 0.03 * generator.normal(size=53)
    values = energy_scores(energy, target)
    intervals = bootstrap_intervals(energy, target, resamples=300)
    for name in METRICS:
        low, high = intervals[name]
        assert low < values[name] < high, name
    assert intervals == bootstrap_intervals(energy, target, resamples=300)
    assert intervals != bootstrap_intervals(energy, target, resamples=300, seed=1)


def test_chunks_change_no_interval(monkeypatch):
    """7 resamples at a time instead of all."""
    target = np.random.default_rng(3).normal(size=11)
    whole = bootstrap_intervals(target[::-1], target, resamples=30)
    monkeypatch.setattr("molflt.evaluation.scores._CHUNK", 77)
    assert bootstrap_intervals(target[::-1], target, resamples=30) == whole


def test_intervals_of_one_system_are_points():
    """And undefined metrics have undefined bounds."""
    intervals = bootstrap_intervals(np.array([1.5]), np.array([1.0]), resamples=10)
    assert intervals["energy_mae"] == (0.5, 0.5)
    assert all(math.isnan(bound) for bound in intervals["r2"])


def test_shapes_that_would_broadcast_are_refused():
    """(N,) against (N, 1)."""
    predictions = SplitPredictions(torch.arange(3), torch.zeros(3), torch.zeros(3, 1))
    with pytest.raises(ValueError, match="must have one shape"):
        score(predictions, "m", "s")
    with pytest.raises(ValueError, match="threshold must be positive"):
        energy_scores(np.zeros(2), np.zeros(2), 0.0)
