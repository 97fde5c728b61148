"""`molflt bench quality` runs what is missing, once, and keeps what came of it."""

import csv

import pytest
import torch

from molflt import cli
from molflt.bench import quality_plans
from molflt.bench.quality import QualityBench, fingerprint
from molflt.bench.quality_plans import Plan
from molflt.config import config_to_dict, load_config, save_config
from molflt.data.charged_fragments import build_charged_fragments


@pytest.fixture
def plan(tmp_path, monkeypatch) -> Plan:
    """A plan `tiny` of two variants on a few charged systems, with a network of the least size."""
    from molflt.config import Config

    build_charged_fragments(tmp_path / "data", num_systems={"train": 7, "val": 3})
    config = Config()
    config.data.root, config.data.val_splits = str(tmp_path / "data" / "open"), ["val"]
    config.model.channels = config.model.ffn_channels = config.model.displacement_channels = 8
    config.model.num_heads, config.model.num_layers, config.model.num_gaussians = 2, 1, 8
    config.optim.delta_pos_weight = (0.0, 0.0)
    config.training.epochs = 2
    config.training.accelerator = "cpu"
    save_config(config, tmp_path / "tiny.yaml")
    tiny = Plan("least size", {"open": str(tmp_path / "tiny.yaml")}, ("near_only", "performer"))
    monkeypatch.setitem(quality_plans.PLANS, "tiny", tiny)
    return tiny


class FakeTraining:
    """Writes a metrics.csv whose last row has the seed as error, and remembers the configurations."""

    def __init__(self):
        self.configs = []

    def __call__(self, config):
        from pathlib import Path

        self.configs.append(config)
        folder = Path(config.training.output)
        folder.mkdir(parents=True)
        with (folder / "metrics.csv").open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["step", "epoch", "val/energy_mae"])
            writer.writerows([[1, 1, 9.0], [2, 2, config.seed + 0.5]])
        return folder


def test_each_run_is_done_once_and_kept(plan, tmp_path):
    bench = QualityBench("tiny", seeds=(0, 3), output=tmp_path / "results")
    training, lines = FakeTraining(), []
    bench.run(training, lines.append)
    assert [(c.seed, c.model.attention.kind) for c in training.configs] == [
        (0, "range_separated"),
        (0, "performer"),
        (3, "range_separated"),
        (3, "performer"),
    ]
    rows = bench.rows()
    assert [(r.variant, r.seed, r.energy_mae, r.steps) for r in rows] == [
        ("performer", 0, 0.5, 2),
        ("performer", 3, 3.5, 2),
        ("near_only", 0, 0.5, 2),
        ("near_only", 3, 3.5, 2),
    ]
    assert len(lines) == 4
    assert (bench.folder / "curves" / "open-performer-3.csv").read_text().count("\n") == 3
    kept = load_config(bench.folder / "configs" / "open-performer.yaml")
    assert fingerprint(kept) == rows[0].settings
    again = FakeTraining()
    bench.run(again)
    assert again.configs == []
    QualityBench("tiny", seeds=(4,), variants=("flt",), output=tmp_path / "results").run(again)
    assert [(c.seed, c.model.attention.kind) for c in again.configs] == [(4, "flt")]
    assert len(bench.rows()) == 5


def test_a_run_of_other_settings_is_done_again_and_replaced(plan, tmp_path):
    bench = QualityBench("tiny", seeds=(1,), variants=("performer",), output=tmp_path / "results")
    QualityBench("tiny", seeds=(1, 5), output=tmp_path / "results").run(FakeTraining())
    before = [row for row in bench.rows() if row.variant == "performer"]
    config = load_config(plan.configs["open"])
    config.optim.lr = 0.007
    save_config(config, plan.configs["open"])
    training = FakeTraining()
    bench.run(training)
    assert len(training.configs) == 1
    # Seed 5 of the old settings would be averaged with it, so it is gone; the other variant's stays.
    after, *others = bench.rows()
    assert (after.variant, after.seed) == ("performer", 1)
    assert after.settings != before[0].settings
    assert [row.variant for row in others] == ["near_only", "near_only"]


def test_spread_of_the_labels_is_that_of_the_split_and_the_guess_that_of_training(plan, tmp_path):
    from molflt.data.datasets import OC20IS2RE

    bench = QualityBench("tiny", seeds=(1,), variants=("performer",), output=tmp_path / "results")
    bench.run(FakeTraining())
    (row,) = bench.rows()
    train, val = (
        torch.stack([d.y_relaxed[0] for d in OC20IS2RE(tmp_path / "data" / "open", split)])
        for split in ("train", "val")
    )
    assert row.energy_std == pytest.approx(val.std(correction=0).item(), abs=1e-5)
    assert row.median_mae == pytest.approx((val - train.median()).abs().mean().item(), abs=1e-5)


def test_the_command_trains_and_its_table_needs_the_results_alone(plan, tmp_path, capsys):
    words = ["bench", "quality", "--plan", "tiny", "--seeds", "2", "--output", str(tmp_path / "results")]
    assert cli.main(words) == 0
    trained = capsys.readouterr()
    assert "2/2 open performer seed 2: val" in trained.err
    (tmp_path / "tiny.yaml").unlink()
    assert cli.main([*words, "--table"]) == 0
    assert capsys.readouterr().out == trained.out
    (near, performer) = sorted(
        QualityBench("tiny", output=tmp_path / "results").rows(), key=lambda r: r.variant
    )
    assert 0 < near.energy_mae < 5
    assert near.energy_mae != performer.energy_mae
    assert (near.epochs, near.steps) == (2, 2)
    assert not [path for path in tmp_path.iterdir() if path.name == "runs"]


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--plan", "fcc112"], "there is no plan 'fcc112'; take one of fcc111, qm7"),
        (["--plan", "qm7", "--variants", "flt,fit"], "no variant 'fit'"),
        (["--plan", "qm7", "--seeds", "1,1"], "different numbers"),
        (["--plan", "qm7", "--seeds", "1,x"], "numbers with commas"),
        (["--plan", "qm7", "--table"], "no results in"),
    ],
)
def test_what_can_not_be_run_is_refused(words, reason, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["bench", "quality", *words]) == 2
    error = capsys.readouterr().err
    assert reason in error
    assert error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_the_fingerprint_reads_all_settings_but_seed_and_place(plan):
    config = plan.config("open", "performer", 0)
    other = plan.config("open", "performer", 9)
    other.training.output = "elsewhere"
    assert fingerprint(config) == fingerprint(other)
    other.data.batch_size += 1
    assert fingerprint(config) != fingerprint(other)
    assert config_to_dict(config)["training"]["output"] != "elsewhere"
