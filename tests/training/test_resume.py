"""Runs that were stopped anywhere and continued end as the ones that were not."""

import csv
import errno
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from molflt import archive
from molflt.checkpoint import load_checkpoint
from molflt.config import save_config
from molflt.data.lmdb_writer import write_lmdb
from molflt.errors import InputError
from molflt.testing import toy_records
from molflt.training import RelaxedEnergyTraining, run, train
from molflt.training.resume import check_continues, find_resume_point

KILLS = 20
SETTINGS = {
    "training.epochs": 11,
    "training.checkpoint_every": 2,
    "training.redraw_every": 5,
    "data.batch_size": 2,
    "data.val_splits": "[val_b]",
    "model.dropout": 0.1,
}


def rows_of(output):
    with (output / "metrics.csv").open(encoding="utf-8", newline="") as file:
        return [row | {"seconds": ""} for row in csv.DictReader(file)]


def assert_same_run(output, expected):
    """Equal rows of metrics, and equal best and last checkpoints: weights and all that is said of them."""
    assert rows_of(output) == rows_of(expected)
    for name in ("best.ckpt", "last.ckpt"):
        first, second = (load_checkpoint(folder / "checkpoints" / name) for folder in (output, expected))
        assert first.metadata == second.metadata
        weights, wanted = first.model.state_dict(), second.model.state_dict()
        for key, value in wanted.items():
            assert torch.equal(weights[key], value), f"{name}: {key}"


@pytest.fixture(scope="module")
def uninterrupted(tiny_config, tmp_path_factory):
    """The run folder of 66 steps without a stop."""
    return train(tiny_config(tmp_path_factory.mktemp("whole") / "run", **SETTINGS), progress=False).output


def test_a_run_killed_twenty_times_ends_as_if_it_had_not_been(tiny_config, tmp_path, uninterrupted):
    """SIGKILL between steps and in the middle of writing checkpoints."""
    save_config(tiny_config(tmp_path / "run", **SETTINGS), tmp_path / "config.yaml")
    script = Path(__file__).with_name("killed_runs.py")
    words = [
        sys.executable,
        str(script),
        str(tmp_path / "config.yaml"),
        str(tmp_path / "run"),
        str(KILLS),
        "5",
    ]
    done = subprocess.run(words, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    told = done.stdout.split("\n")
    assert told.count("killed step") + told.count("killed write") == KILLS
    assert told.count("killed write") > 2
    assert_same_run(tmp_path / "run", uninterrupted)


class Stopped(Exception):
    """Ends a training from within."""


def train_until(config, step, monkeypatch, **kwargs):
    """Train, and stop before the step of that number."""
    start = RelaxedEnergyTraining.on_train_batch_start

    def stopping(self, batch, batch_idx):
        if self.global_step == step:
            raise Stopped
        return start(self, batch, batch_idx)

    with monkeypatch.context() as patch:
        patch.setattr(RelaxedEnergyTraining, "on_train_batch_start", stopping)
        with pytest.raises(Stopped):
            train(config, **{"progress": False} | kwargs)


def test_a_damaged_state_is_named_and_the_one_before_it_is_used(
    tiny_config, tmp_path, uninterrupted, monkeypatch, capfd
):
    """Cut short at step 20: the run goes on from step 18, and ends the same."""
    config = tiny_config(tmp_path / "run", **SETTINGS)
    train_until(config, 21, monkeypatch)
    newest = tmp_path / "run" / "checkpoints" / "resume.ckpt"
    newest.write_bytes(newest.read_bytes()[:-1000])
    capfd.readouterr()
    train_until(config, 19, monkeypatch, resume=True)
    err = capfd.readouterr().err
    assert err.startswith(f"molflt: {newest} is no checkpoint, or a cut one")
    assert err.endswith("continuing from resume-previous.ckpt, step 18\n")
    train(config, resume=True, progress=False)
    assert_same_run(tmp_path / "run", uninterrupted)


def test_states_that_are_all_damaged_are_an_error(tiny_config, tmp_path, monkeypatch):
    """A run is not silently begun anew over one that has results."""
    config = tiny_config(tmp_path / "run", **SETTINGS)
    train_until(config, 7, monkeypatch)
    for path in (tmp_path / "run" / "checkpoints").glob("resume*.ckpt"):
        path.write_bytes(b"0" * 100)
    with pytest.raises(
        InputError, match=r"no state of this run can be read .*; start it anew with --overwrite"
    ):
        train(config, resume=True, progress=False)


def test_a_full_disk_is_said_and_the_run_goes_on_once_there_is_room(
    tiny_config, tmp_path, uninterrupted, monkeypatch
):
    """The state before the failed one is whole, nothing half-written is left."""
    config = tiny_config(tmp_path / "run", **SETTINGS)
    write, left = archive._Sink.write, 200_000

    def full(self, data):
        nonlocal left
        left -= len(data)
        if left < 0:
            self.error = OSError(errno.ENOSPC, "No space left on device")
            raise self.error
        return write(self, data)

    with monkeypatch.context() as patch:
        patch.setattr(archive._Sink, "write", full)
        with pytest.raises(InputError, match=r"cannot write .*: No space left on device.*--resume"):
            train(config, progress=False)
    assert left < 0
    folder = tmp_path / "run" / "checkpoints"
    assert not [path for path in folder.iterdir() if path.suffix != ".ckpt"]
    for path in folder.iterdir():
        assert archive.read_archive(path)
    train(config, resume=True, progress=False)
    assert_same_run(tmp_path / "run", uninterrupted)


def test_other_settings_are_refused_by_name_and_harmless_ones_are_not(tiny_config, tmp_path, monkeypatch):
    """What changes the result has to be as it was; where the files are and how they are read may differ."""
    output = tmp_path / "run"
    train_until(tiny_config(output, **SETTINGS), 3, monkeypatch)
    changes = {"optim.lr": 3e-3, "training.epochs": 12}
    with pytest.raises(InputError) as caught:
        train(tiny_config(output, **SETTINGS | changes), resume=True, progress=False)
    assert "optim.lr was 0.001 and is 0.003; training.epochs was 11 and is 12" in str(caught.value)
    free = {"training.cache_gib": 0.0, "training.on_nonfinite": "skip", "training.tensorboard": False}
    train_until(tiny_config(output, **SETTINGS | free), 5, monkeypatch, resume=True)
    point = find_resume_point(output)
    assert point is not None
    assert point.step == 4
    check_continues(point, tiny_config(output, **SETTINGS | {"training.wandb": "flt"}), point.data, 1)


def test_other_data_under_the_same_name_are_refused(tiny_config, toy_root, tmp_path, monkeypatch):
    """The split is named; the same data elsewhere are the same data."""
    output = tmp_path / "run"
    train_until(tiny_config(output, **SETTINGS), 3, monkeypatch)
    moved = tmp_path / "moved"
    shutil.copytree(toy_root, moved)
    config = tiny_config(output, **SETTINGS | {"data.root": moved})
    train_until(config, 5, monkeypatch, resume=True)
    (moved / "val_b" / "data.0000.lmdb").unlink()
    write_lmdb(moved / "val_b" / "data.0000.lmdb", toy_records(5, first_seed=300))
    with pytest.raises(InputError, match=r"the data of val_b at .* are not those it began with"):
        train(config, resume=True, progress=False)


def test_what_the_data_gave_is_kept_with_the_run(tiny_config, tmp_path, uninterrupted, monkeypatch, capsys):
    """Continued, at its first step or later, a run reads nothing for it, says so, and ends the same."""
    config = tiny_config(tmp_path / "run", **SETTINGS)
    train_until(config, 1, monkeypatch)

    def refuse(*arguments):
        raise AssertionError("the data are read again")

    monkeypatch.setattr(run, "fit_data", refuse)
    capsys.readouterr()
    train_until(config, 9, monkeypatch, resume=True, progress=True)
    assert "molflt: statistics of the data: kept with the run\n" in capsys.readouterr().err
    train(config, resume=True, progress=False)
    assert_same_run(tmp_path / "run", uninterrupted)


def test_a_moved_run_keeps_its_best_checkpoint(tiny_config, tmp_path, uninterrupted, monkeypatch):
    """Continued in another folder, the best value so far is still the one to beat."""
    train_until(tiny_config(tmp_path / "here", **SETTINGS), 40, monkeypatch)
    (tmp_path / "here").rename(tmp_path / "there")
    result = train(tiny_config(tmp_path / "there", **SETTINGS), resume=True, progress=False)
    assert result.best_checkpoint == tmp_path / "there" / "checkpoints" / "best.ckpt"
    assert_same_run(tmp_path / "there", uninterrupted)
    assert not (tmp_path / "here").exists()


def test_resuming_a_finished_run_trains_nothing(tiny_config, tmp_path, monkeypatch):
    """It gives the same result again."""
    config = tiny_config(tmp_path / "run", **SETTINGS | {"training.epochs": 2})
    first = train(config, resume=True, progress=False)
    rows = rows_of(first.output)

    def refuse(self, batch, batch_idx):
        raise AssertionError("trained")

    monkeypatch.setattr(RelaxedEnergyTraining, "training_step", refuse)
    assert train(config, resume=True, progress=False) == first
    assert rows_of(first.output) == rows


def test_only_what_is_a_run_is_resumed(tiny_config, tmp_path):
    """Not a folder of other files, and not together with --overwrite."""
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(InputError, match="holds no run that can be continued"):
        train(tiny_config(tmp_path), resume=True, progress=False)
    with pytest.raises(InputError, match="give one of them"):
        train(tiny_config(tmp_path / "run"), resume=True, overwrite=True, progress=False)


def test_a_state_to_continue_from_does_not_predict(tiny_config, tmp_path, monkeypatch):
    """Its weights are not the average that was validated."""
    train_until(tiny_config(tmp_path / "run", **SETTINGS), 3, monkeypatch)
    with pytest.raises(InputError, match="is no molflt checkpoint"):
        load_checkpoint(tmp_path / "run" / "checkpoints" / "resume.ckpt")


def test_augmentation_and_workers_go_on_where_they_were(tiny_config, tmp_path, monkeypatch):
    """Stopped within an epoch and continued with a worker process, as a whole run without any."""
    settings = SETTINGS | {"training.epochs": 3, "data.interpolate_fraction": 0.5, "data.max_atoms": 31}
    whole = train(tiny_config(tmp_path / "whole", **settings), progress=False).output
    train_until(tiny_config(tmp_path / "run", **settings), 8, monkeypatch)
    config = tiny_config(tmp_path / "run", **settings, **{"data.num_workers": 1})
    train(config, resume=True, progress=False)
    assert_same_run(tmp_path / "run", whole)
