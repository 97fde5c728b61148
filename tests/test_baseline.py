"""The ridge baseline of fcc111: its algebra, its reading of ids, and its score on the shipped data."""

from pathlib import Path

import numpy as np
import pytest

from molflt.baseline import decode_sid, evaluate_fcc111_baseline, fit_ridge, one_hot
from molflt.data.datasets import OC20IS2RE
from molflt.errors import InputError

FCC111 = Path(__file__).parents[1] / "datasets" / "fcc111"


def explicit_ridge(features, target, penalty):
    """Normal equations with an intercept column that is not penalised."""
    augmented = np.column_stack([features, np.ones(len(features))])
    penalties = np.diag([penalty] * features.shape[1] + [0.0])
    return np.linalg.solve(augmented.T @ augmented + penalties, augmented.T @ target)


def test_ridge_solves_the_normal_equations_of_the_best_penalty():
    """Coefficients, intercept, and the choice of penalty by leaving each of 23 rows out in turn."""
    generator = np.random.default_rng(0)
    features = generator.normal(size=(23, 5))
    target = features @ generator.normal(size=5) + 3.0 + generator.normal(size=23)
    penalties = (0.01, 1.0, 5.0, 100.0)

    def leave_one_out(penalty):
        errors = []
        for row in range(23):
            kept = np.arange(23) != row
            *coefficients, intercept = explicit_ridge(features[kept], target[kept], penalty)
            errors.append((features[row] @ coefficients + intercept - target[row]) ** 2)
        return np.mean(errors)

    best = min(penalties, key=leave_one_out)
    *expected, expected_intercept = explicit_ridge(features, target, best)
    coefficients, intercept = fit_ridge(features, target, penalties)
    np.testing.assert_allclose(coefficients, expected, atol=1e-10)
    assert intercept == pytest.approx(expected_intercept, abs=1e-10)


def test_one_hot_leaves_unknown_labels_without_a_column():
    """Two columns of labels with 2 and 3 categories; 9 is none of them."""
    labels = np.array([[1, 5], [2, 9], [9, 7]])
    expected = [[1, 0, 1, 0, 0], [0, 1, 0, 0, 0], [0, 0, 0, 0, 1]]
    assert one_hot(labels, [np.array([1, 2]), np.array([5, 6, 7])]).tolist() == expected


@pytest.mark.parametrize("split", ["val_id", "val_ood_both"])
def test_ids_say_what_the_structures_hold(split):
    """Metal, adsorbate and number of the shipped records agree with their atoms; sites are four."""
    samples = list(OC20IS2RE(FCC111, split))
    labels = decode_sid(np.array([int(sample.sid) for sample in samples]))
    for sample, (metal, adsorbate, number, site) in zip(samples, labels, strict=True):
        adsorbates = sample.atomic_numbers[sample.tags == 2].tolist()
        assert adsorbates == [adsorbate] * number
        assert sample.atomic_numbers[sample.tags < 2].unique().tolist() == [metal]
        assert 1 <= site <= 4


def test_scores_on_the_shipped_data():
    """The figures to beat, with every system of the validation splits counted."""
    scores = {(row.method, row.split): row for row in evaluate_fcc111_baseline(FCC111)}
    total, single = (scores[method, "val_id"] for method in ("ridge on one-hots", "ridge, per adsorbate"))
    assert total.energy_mae == pytest.approx(1.906, abs=0.01)
    assert single.energy_mae == pytest.approx(1.456, abs=0.01)
    assert total.num_systems == 99
    assert {split for _, split in scores} == {"val_id", "val_ood_ads", "val_ood_cat", "val_ood_both"}


def test_another_data_set_is_refused(toy_root):
    """Its ids would be read as metals and sites that are not there."""
    with pytest.raises(InputError, match=r"sid 1000 in .* is no id of fcc111"):
        evaluate_fcc111_baseline(toy_root)
