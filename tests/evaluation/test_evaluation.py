"""Scores of a checkpoint against computation by hand, one system at a time."""

import csv
import json
from dataclasses import replace

import pytest
import torch

from molflt import cli
from molflt.build import build_dataset
from molflt.checkpoint import load_checkpoint, model_from_config, save_checkpoint
from molflt.errors import InputError
from molflt.evaluation import (
    SplitPredictions,
    evaluate,
    evaluate_checkpoints,
    predict_split,
    score,
    scores_json,
    write_csv,
)
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
    with pytest.raises(InputError, match="absent does not exist; give the data set's folder"):
        evaluate(finished_run.best_checkpoint, root=tmp_path / "absent")
    write_toy_lmdb(tmp_path / "test_id.lmdb", 2, labels=False)
    with pytest.raises(InputError, match="sid 1000 has no y_relaxed"):
        evaluate(finished_run.best_checkpoint, root=tmp_path)
    with pytest.raises(InputError, match=r"test_id\.lmdb is a file; give the folder"):
        evaluate(finished_run.best_checkpoint, root=tmp_path / "test_id.lmdb")


def test_score_of_given_predictions():
    """Errors 0, 0.01 and 0.29 eV: a mean of 0.1 and two within 0.02 eV."""
    energy = torch.tensor([1.0, 2.01, -0.29], dtype=torch.float64)
    target = torch.tensor([1.0, 2.0, 0.0], dtype=torch.float64)
    row = score(SplitPredictions(torch.arange(3), energy, target), "by hand", "val_id")
    assert row.energy_mae == pytest.approx(0.1, abs=1e-12)
    assert row.ewt == pytest.approx(2 / 3, abs=1e-12)
    assert (row.method, row.split, row.num_systems) == ("by hand", "val_id", 3)


@pytest.fixture(scope="module")
def other(finished_run, tmp_path_factory):
    """Another network of the same task, untrained."""
    checkpoint = load_checkpoint(finished_run.best_checkpoint)
    torch.manual_seed(9)
    model = model_from_config(checkpoint.config)
    path = tmp_path_factory.mktemp("other") / "other.ckpt"
    save_checkpoint(path, replace(checkpoint, model=model.eval()))
    return path


def test_overall_is_the_score_of_all_systems_together(finished_run):
    """Each counts once, so the splits' MAEs are weighted by their sizes; a split named twice counts once."""
    evaluation = evaluate_checkpoints(
        [finished_run.best_checkpoint], splits=["val_a", "val_b", "val_a"], resamples=50
    )
    a, b, overall = evaluation.scores
    assert [row.split for row in evaluation.scores] == ["val_a", "val_b", "overall"]
    assert overall.num_systems == a.num_systems + b.num_systems == 12
    assert overall.energy_mae == pytest.approx((7 * a.energy_mae + 5 * b.energy_mae) / 12, abs=1e-12)
    assert overall.energy_mse == pytest.approx((7 * a.energy_mse + 5 * b.energy_mse) / 12, abs=1e-12)
    assert all(row.intervals["energy_mae"][0] <= row.energy_mae for row in evaluation.scores)
    alone = evaluate_checkpoints([finished_run.best_checkpoint], splits=["val_a"], resamples=0)
    assert [row.split for row in alone.scores] == ["val_a"]
    assert alone.scores[0].intervals == {}


def test_seeds_give_mean_spread_and_the_ensembles_own_score(finished_run, other):
    """Mean and standard deviation of the two MAEs, and the MAE of the mean energy, by hand."""
    paths = [finished_run.best_checkpoint, other]
    evaluation = evaluate_checkpoints(paths, splits=["val_a"], resamples=0)
    first, second, mean, ensemble = evaluation.scores
    assert [row.method for row in evaluation.scores] == [*map(str, paths), "mean of 2", "ensemble of 2"]
    single = [evaluate(path, splits=["val_a"])[0].energy_mae for path in paths]
    assert [first.energy_mae, second.energy_mae] == pytest.approx(single, abs=1e-12)
    assert mean.energy_mae == pytest.approx(sum(single) / 2, abs=1e-12)
    assert mean.stds["energy_mae"] == pytest.approx(abs(single[0] - single[1]) / 2**0.5, abs=1e-12)
    one, two = evaluation.members["val_a"]
    energy = (one.energy.double() + two.energy.double()) / 2
    assert ensemble.energy_mae == pytest.approx(float((energy - one.target).abs().mean()), abs=1e-12)
    assert ensemble.energy_mse < mean.energy_mse - 1e-3


def test_a_breakdown_scores_each_group_of_each_split(finished_run):
    """By metal and by size: the groups of a split weigh up to its score."""
    evaluation = evaluate_checkpoints([finished_run.best_checkpoint], by=["metal", "size"], resamples=0)
    for grouping in ("metal", "size"):
        for split in ("val_a", "val_b"):
            rows = [
                r for r in evaluation.breakdown if r.split == split and r.group.startswith(grouping + "=")
            ]
            [whole] = [row for row in evaluation.scores if row.split == split]
            assert sum(row.num_systems for row in rows) == whole.num_systems
            weighted = sum(row.num_systems * row.energy_mae for row in rows) / whole.num_systems
            assert weighted == pytest.approx(whole.energy_mae, abs=1e-12)
    assert {row.group for row in evaluation.breakdown if "size" in row.group} == {"size=1-20"}
    assert len({row.group for row in evaluation.breakdown if "metal" in row.group}) > 3


def test_another_threshold_changes_ewt_alone(finished_run):
    """Above the largest error all are within."""
    usual, wide = (
        evaluate_checkpoints([finished_run.best_checkpoint], threshold=threshold, resamples=0).scores[0]
        for threshold in (0.02, 1e3)
    )
    assert wide.ewt == 1.0
    assert usual.ewt < 1.0
    assert usual.energy_mae == wide.energy_mae


def test_checkpoints_of_different_targets_are_not_compared(finished_run, tmp_path):
    """Both meanings are named."""
    checkpoint = load_checkpoint(finished_run.best_checkpoint)
    metadata = replace(checkpoint.metadata, energy_meaning="another")
    with pytest.raises(InputError, match="predict different energies"):
        evaluate_checkpoints([checkpoint, replace(checkpoint, metadata=metadata)])


def test_written_tables_agree_with_the_scores(finished_run, other, tmp_path):
    """CSV rows give the MAE of the ensemble; JSON has null for what is not defined."""
    evaluation = evaluate_checkpoints([finished_run.best_checkpoint, other], with_systems=True, resamples=0)
    write_csv(tmp_path / "rows.csv", evaluation)
    with (tmp_path / "rows.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["split"] for row in rows] == ["val_a"] * 7 + ["val_b"] * 5
    assert [int(row["sid"]) for row in rows] == [*range(1100, 1107), *range(1200, 1205)]
    [overall] = [r for r in evaluation.scores if (r.method, r.split) == ("ensemble of 2", "overall")]
    mae = sum(abs(float(row["error"])) for row in rows) / len(rows)
    assert mae == pytest.approx(overall.energy_mae, abs=1e-12)
    for row in rows:
        one, two = float(row["energy_0"]), float(row["energy_1"])
        assert float(row["energy"]) == pytest.approx((one + two) / 2, abs=1e-12)
        assert float(row["std"]) == pytest.approx(abs(one - two) / 2**0.5, abs=1e-12)
        assert float(row["error"]) == pytest.approx(float(row["energy"]) - float(row["target"]), abs=1e-12)
    undefined = replace(overall, r2=float("nan"), intervals={"r2": (float("nan"), 1.0)})
    [plain] = scores_json([undefined])
    assert (plain["r2"], plain["intervals"]["r2"]) == (None, [None, 1.0])
    json.dumps(plain, allow_nan=False)
    with pytest.raises(InputError, match="cannot write"):
        write_csv(tmp_path / "no" / "rows.csv", evaluation)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rows.csv"]


def test_energies_that_are_not_finite_are_refused(finished_run, toy_root, tmp_path, capsys):
    """NaN weights: one line that names the first system, and no file, from both commands."""
    checkpoint = load_checkpoint(finished_run.best_checkpoint)
    for parameter in checkpoint.model.parameters():
        parameter.data.fill_(float("nan"))
    bad = tmp_path / "nan.ckpt"
    save_checkpoint(bad, checkpoint)
    for domain in ("id", "ood_ads", "ood_cat", "ood_both"):
        write_toy_lmdb(tmp_path / f"test_{domain}.lmdb", 2, first_seed=7, labels=False)
    before = sorted(tmp_path.iterdir())
    rows, report = str(tmp_path / "rows.csv"), str(tmp_path / "report.html")
    for words, sid in (
        (["evaluate", str(bad), "--csv", rows, "--report", report], 1100),
        (["leaderboard", "make", str(tmp_path / "out.npz"), str(bad), "--data", str(tmp_path)], 1007),
    ):
        assert cli.main(words) == 2
        out, err = capsys.readouterr()
        assert (out, len(err.splitlines())) == ("", 1)
        assert f"the predicted energy of sid {sid} is nan; use another checkpoint" in err
    assert sorted(tmp_path.iterdir()) == before
