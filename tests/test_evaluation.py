"""Scores of a checkpoint against computation by hand, one system at a time."""

import pytest
import torch

from molflt.build import build_dataset
from molflt.checkpoint import load_checkpoint
from molflt.errors import InputError
from molflt.evaluation import SplitPredictions, evaluate, predict_split, score
from molflt.testing import write_toy_lmdb


def test_scores_equal_predictions_made_one_at_a_time(finished_run):
    """Energy MAE and n of each split, whatever the batch size (5, 7 and 2 divide neither split evenly)."""
    checkpoint = load_checkpoint(finished_run.best_checkpoint)
    expected = {}
    for split in ("val_a", "val_b"):
        errors = []
        for sample in build_dataset(checkpoint.config.data, split):
            with torch.inference_mode():
                errors.append(abs(float(checkpoint.model(sample).energy) - float(sample.y_relaxed)))
        expected[split] = (sum(errors) / len(errors), len(errors))
    for batch_size in (None, 2, 5, 7):
        scores = evaluate(checkpoint, splits=["val_b", "val_a"], batch_size=batch_size)
        assert [row.split for row in scores] == ["val_b", "val_a"]
        for row in scores:
            mae, count = expected[row.split]
            assert row.energy_mae == pytest.approx(mae, abs=1e-5)
            assert row.num_systems == count


def test_energies_do_not_depend_on_the_batch(finished_run):
    """To 1e-5 eV, and in the order of the data set."""
    checkpoint = load_checkpoint(finished_run.best_checkpoint)
    dataset = build_dataset(checkpoint.config.data, "train")
    one, many = (predict_split(checkpoint.model, dataset, size) for size in (1, 11))
    assert one.sid.tolist() == many.sid.tolist() == list(range(1000, 1011))
    torch.testing.assert_close(one.energy, many.energy, rtol=0, atol=1e-5)
    assert one.target.tolist() == [float(sample.y_relaxed) for sample in dataset]
    assert one.energy.std() > 1e-3


def test_default_splits_are_all_but_the_training_split(finished_run):
    """In the order of their names."""
    assert [row.split for row in evaluate(finished_run.best_checkpoint)] == ["val_a", "val_b"]


def test_another_root_can_be_scored(finished_run, tmp_path):
    """A data set elsewhere, of other size, with a split named as the training's."""
    (tmp_path / "train").mkdir()
    write_toy_lmdb(tmp_path / "train" / "data.lmdb", 3, first_seed=50)
    [row] = evaluate(finished_run.best_checkpoint, root=tmp_path, splits=["train"])
    assert row.num_systems == 3
    own = evaluate(finished_run.best_checkpoint, splits=["train"])[0]
    assert abs(row.energy_mae - own.energy_mae) > 1e-3


def test_what_cannot_be_scored_is_named(finished_run, tmp_path):
    """A split that is not there, a root without splits, a split without labels."""
    with pytest.raises(InputError, match=r"no split 'val_c'; it has train, val_a, val_b"):
        evaluate(finished_run.best_checkpoint, splits=["val_c"])
    with pytest.raises(InputError, match="holds no splits to score"):
        evaluate(finished_run.best_checkpoint, root=tmp_path)
    write_toy_lmdb(tmp_path / "test_id.lmdb", 2, labels=False)
    with pytest.raises(InputError, match="sid 1000 has no y_relaxed"):
        evaluate(finished_run.best_checkpoint, root=tmp_path)


def test_score_of_given_predictions():
    """Errors 0, 0.01 and 0.29 eV: a mean of 0.1 and two within 0.02 eV."""
    energy = torch.tensor([1.0, 2.01, -0.29], dtype=torch.float64)
    target = torch.tensor([1.0, 2.0, 0.0], dtype=torch.float64)
    row = score(SplitPredictions(torch.arange(3), energy, target), "by hand", "val_id")
    assert row.energy_mae == pytest.approx(0.1, abs=1e-12)
    assert row.ewt == pytest.approx(2 / 3, abs=1e-12)
    assert (row.method, row.split, row.num_systems) == ("by hand", "val_id", 3)
