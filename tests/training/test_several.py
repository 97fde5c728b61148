"""Several seeds in one command."""

import dataclasses
import json
import statistics

import pytest
import torch

from molflt import cli
from molflt.checkpoint import load_checkpoint
from molflt.config import save_config
from molflt.errors import InputError
from molflt.training import several, summarize, train, train_seeds

SETTINGS = {"training.epochs": 2, "data.val_splits": "[val_b]"}


def test_each_seed_is_trained_and_mean_and_spread_are_printed(tiny_config, tmp_path, capsys):
    """The runs are those of the seeds alone; the table has each, their mean and standard deviation."""
    config = tiny_config(tmp_path / "runs", **SETTINGS)
    save_config(config, tmp_path / "tiny.yaml")
    assert cli.main(["train", str(tmp_path / "tiny.yaml"), "--seeds", "3,5,7"]) == 0
    out = capsys.readouterr().out
    results = train_seeds(config, [3, 5, 7], resume=True, progress=False)
    alone = train(tiny_config(tmp_path / "alone", **SETTINGS, seed=5), progress=False)
    assert results[5].best_energy_mae == alone.best_energy_mae
    weights = (load_checkpoint(result.last_checkpoint).model.state_dict() for result in (results[5], alone))
    assert all(torch.equal(*pair) for pair in zip(*(state.values() for state in weights), strict=True))
    best = [result.best_energy_mae for result in results.values()]
    last = [result.last_energy_mae for result in results.values()]
    assert len(set(best)) == 3
    for result in results.values():
        assert f"{result.best_energy_mae:.4f}" in out
        assert str(result.output / "checkpoints" / "best.ckpt") in out
    summary = summarize(results)
    assert summary.best_mean == pytest.approx(sum(best) / 3)
    assert summary.last_std == pytest.approx(statistics.stdev(last))
    assert [f"{value:.4f}" in out for value in dataclasses.astuple(summary)] == [True] * 4
    kept = json.loads((tmp_path / "runs" / "seeds.json").read_text())
    assert {name: kept[name] for name in dataclasses.asdict(summary)} == dataclasses.asdict(summary)
    assert [row["seed"] for row in kept["seeds"]] == [3, 5, 7]
    assert [(row["best"], row["last"]) for row in kept["seeds"]] == list(zip(best, last, strict=True))
    assert kept["quantity"] == "energy MAE on val_b, eV"
    assert load_checkpoint(tmp_path / "runs" / kept["seeds"][1]["best_checkpoint"]).config.seed == 5


def test_what_is_done_is_kept_when_a_later_seed_fails_and_not_replaced_unasked(
    tiny_config, tmp_path, monkeypatch
):
    """The file has the first seed, without a spread; new seeds alone would make it forget that one."""
    train_one = several.train

    def failing(config, **how):
        if config.seed == 5:
            raise InputError("no room")
        return train_one(config, **how)

    monkeypatch.setattr(several, "train", failing)
    config = tiny_config(tmp_path / "runs", **SETTINGS | {"training.epochs": 1})
    with pytest.raises(InputError, match="no room"):
        train_seeds(config, [3, 5], progress=False)
    kept = json.loads((tmp_path / "runs" / "seeds.json").read_text())
    assert [row["seed"] for row in kept["seeds"]] == [3]
    assert kept["best_mean"] == kept["seeds"][0]["best"]
    assert kept["best_std"] is None
    with pytest.raises(InputError, match=r"seeds\.json holds the results of other seeds; add --resume"):
        train_seeds(config, [7], progress=False)
    assert not (tmp_path / "runs" / "seed-7").exists()


def test_one_folder_in_use_stops_all_before_the_first(tiny_config, tmp_path):
    """No seed is trained in vain."""
    (tmp_path / "runs" / "seed-5").mkdir(parents=True)
    (tmp_path / "runs" / "seed-5" / "notes.txt").write_text("mine")
    with pytest.raises(InputError, match="seed-5 is not empty"):
        train_seeds(tiny_config(tmp_path / "runs", **SETTINGS), [3, 5], progress=False)
    assert not (tmp_path / "runs" / "seed-3").exists()


def test_seeds_do_not_go_into_the_folder_of_a_run(tiny_config, tmp_path):
    """Whatever is to become of what it holds."""
    (tmp_path / "config.yaml").write_text("seed: 3")
    for how in ({}, {"overwrite": True}, {"resume": True}):
        with pytest.raises(InputError, match="holds a run of its own; choose another"):
            train_seeds(tiny_config(tmp_path, **SETTINGS), [3, 5], progress=False, **how)
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"]


@pytest.mark.parametrize("text", ["3,3", "-1", "a", ""])
def test_seeds_are_different_numbers(tiny_config, tmp_path, text, capsys):
    """One line for anything else."""
    save_config(tiny_config(tmp_path / "runs"), tmp_path / "tiny.yaml")
    assert cli.main(["train", str(tmp_path / "tiny.yaml"), f"--seeds={text}"]) == 2
    assert "argument --seeds" in capsys.readouterr().err
