"""The bench of training: what it counts and what it writes; its times are for people."""

import json

import pytest

from molflt import cli
from molflt.bench.training import StepClock, bench_training
from molflt.bench.training_settings import TrainingBenchSettings
from molflt.config import save_config
from molflt.errors import InputError


@pytest.fixture
def words(tiny_config, toy_root, tmp_path):
    save_config(tiny_config(tmp_path / "unused", **{"data.batch_size": 3}), tmp_path / "tiny.yaml")
    sizes = ["--steps", "3", "--warmup", "2", "--workers", "0", "--oc20-batch-size", "5"]
    where = ["--config", str(tmp_path / "tiny.yaml"), "--oc20", str(toy_root / "val_a")]
    return ["bench", "training", *sizes, *where, "--output", str(tmp_path / "out")]


def test_the_command_measures_both_kinds_of_data(words, tmp_path, capsys):
    """The batches have the sizes asked for, and the numbers fit together."""
    assert cli.main(words) == 0
    content = json.loads((tmp_path / "out" / "training.json").read_text())
    assert str(tmp_path / "out" / "training.json") in capsys.readouterr().out.replace("\n", "")
    own, large = content["measurements"]
    assert (own["batch_size"], large["batch_size"]) == (3, 5)
    assert large["data"] == "OC20-sized"
    for row in (own, large):
        assert 5 * row["batch_size"] <= row["atoms"] <= 17 * row["batch_size"]
        assert 0 < row["wait_share"] < 1
        assert row["bare"]["minimum"] <= row["bare"]["median"] <= row["bare"]["maximum"]
        assert row["overhead"]["median"] > -1
        assert row["systems_per_second"] > 0


def test_the_clock_stops_at_every_batch_and_the_bare_model_leaves_training_as_it_is(
    tiny_config, tmp_path, monkeypatch
):
    """As many instants as batches, in order, in both runs: without and beside the bare model."""
    save_config(tiny_config(tmp_path / "unused"), tmp_path / "tiny.yaml")
    clocks = []
    monkeypatch.setattr(StepClock, "on_train_start", _recorded(clocks, StepClock.on_train_start))
    oc20 = str(tiny_config(tmp_path).data.root + "/val_b")
    settings = TrainingBenchSettings(
        str(tmp_path / "tiny.yaml"), oc20, steps=2, warmup=1, workers=0, output=str(tmp_path / "out")
    )
    bench_training(settings)
    assert [clock.bare for clock, _ in clocks] == [False, True, False, True]
    for clock, _ in clocks:
        assert len(clock.arrivals) == len(clock.starts) == len(clock.loader.waits) == 4
        gaps = zip(clock.starts, clock.arrivals[1:], clock.loader.waits[1:], strict=False)
        assert all(0 < wait < arrival.wall - start.wall for start, arrival, wait in gaps)
        times = zip(clock.arrivals, clock.starts, strict=True)
        flat = [instant.wall for group in times for instant in group]
        assert flat == sorted(flat)
    (_, alone), (_, beside), *_ = clocks
    for name, value in alone.state_dict().items():
        assert value.equal(beside.state_dict()[name]), name


def _recorded(clocks, start):
    def recorded(self, trainer, pl_module):
        clocks.append((self, pl_module.model))
        start(self, trainer, pl_module)

    return recorded


@pytest.mark.parametrize(("name", "value"), [("steps", 1), ("warmup", 0), ("workers", -1), ("threads", 0)])
def test_numbers_below_their_minimum_are_refused(name, value):
    """By the option's name."""
    with pytest.raises(InputError, match=f"--{name} must be at least"):
        TrainingBenchSettings(**{name: value})
