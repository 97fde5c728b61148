"""Several processes against one, through torchrun on this machine's CPU."""

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from lightning.pytorch.utilities import rank_zero_only

from molflt.checkpoint import load_checkpoint
from molflt.config import save_config
from molflt.errors import InputError
from molflt.run_folder import is_first_process
from molflt.training import train
from molflt.training.trainer import check_launch, make_trainer

SCRIPT = Path(__file__).with_name("several_processes.py")
SETTINGS = {"training.epochs": 3, "training.validate_every": 1, "training.redraw_every": 4}
SETTINGS |= {"training.checkpoint_every": 1, "optim.lr": 3e-3}


def rows_of(output):
    with (output / "metrics.csv").open(encoding="utf-8", newline="") as file:
        return [
            {name: float(value) for name, value in row.items() if name != "seconds"}
            for row in csv.DictReader(file)
        ]


def torchrun(*words, processes=2, timeout=900):
    """Run the script in so many processes, one thread each."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={processes}", str(SCRIPT), *map(str, words)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=environment)


@pytest.fixture(scope="module")
def folder(tiny_config, tmp_path_factory):
    """Where two processes have trained; `told` in it is what they printed."""
    path = tmp_path_factory.mktemp("processes")
    save_config(tiny_config(path / "unused", **SETTINGS, **{"data.batch_size": 2}), path / "config.yaml")
    done = torchrun(path / "config.yaml", path)
    assert done.returncode == 0, done.stderr[-5000:]
    (path / "told").write_text(done.stdout)
    return path


def told(folder):
    return dict(line.split(": ", 1) for line in (folder / "told").read_text().splitlines() if ": " in line)


def assert_same_curve(rows, expected, rel=1e-5):
    """Equal to what sums in another order can differ by."""
    assert len(rows) == len(expected)
    for row, wanted in zip(rows, expected, strict=True):
        assert row == pytest.approx(wanted, rel=rel, abs=1e-9)


def assert_close(weights, wanted):
    """Equal likewise, but for the keys' biases: softmax takes no notice of them, and Adam turns the rounding
    of their zero gradient into whole steps."""
    for name, value in wanted.items():
        if not name.endswith("key.bias"):
            torch.testing.assert_close(weights[name], value, rtol=1e-4, atol=1e-6)


def test_two_processes_have_the_curve_of_one_with_the_same_global_batch(folder, tiny_config):
    """11 systems in steps of 4, the last of 2 + 1; validation on 7 and 5; frequencies redrawn twice."""
    one = train(tiny_config(folder / "one", **SETTINGS, **{"data.batch_size": 4}), progress=False)
    assert_same_curve(rows_of(folder / "ddp"), rows_of(one.output))
    weights, wanted = (
        load_checkpoint(output / "checkpoints" / "last.ckpt").model.state_dict()
        for output in (folder / "ddp", one.output)
    )
    assert_close(weights, wanted)


def test_four_processes_have_the_curve_of_one_with_the_same_global_batch(tiny_config, tmp_path):
    """11 systems in steps of 4, the last of 3, so that one process has none; validation on 7 and 5."""
    save_config(tiny_config(tmp_path / "four", **SETTINGS, **{"data.batch_size": 1}), tmp_path / "four.yaml")
    script = SCRIPT.with_name("forked_processes.py")
    command = [sys.executable, str(script), str(tmp_path / "four.yaml"), "4"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr[-5000:]
    one = train(tiny_config(tmp_path / "one", **SETTINGS, **{"data.batch_size": 4}), progress=False)
    assert_same_curve(rows_of(tmp_path / "four"), rows_of(one.output))


def test_a_process_without_a_batch_keeps_step_and_counts_for_nothing(folder, tiny_config):
    """5 systems in steps of 4: in the second step one process has a system and the other has none."""
    settings = SETTINGS | {"data.batch_size": 4, "data.train_split": "val_b", "data.val_splits": "[val_a]"}
    one = train(tiny_config(folder / "one-repeated", **settings), progress=False)
    assert_same_curve(rows_of(folder / "repeated"), rows_of(one.output))


def test_batches_of_unequal_sizes_do_not_hang(folder):
    """By a budget of atoms each process has other numbers of systems, and all steps are trained."""
    rows = rows_of(folder / "budget")
    assert [row["epoch"] for row in rows] == [1, 2, 3]
    assert all(row["train/energy_mae"] > 0 for row in rows)


def test_a_process_without_a_validation_batch_counts_for_nothing(folder, tiny_config):
    """Each split is one batch, which the second process repeats."""
    settings = SETTINGS | {"data.max_atoms": 500}
    one = train(tiny_config(folder / "one-few", **settings), progress=False)
    assert_same_curve(rows_of(folder / "few"), rows_of(one.output))


def test_sharded_training_has_the_curve_of_one_process(folder):
    """FSDP, stopped within an epoch and resumed, its averaged weights put together in the checkpoint."""
    assert_same_curve(rows_of(folder / "resumed-fsdp"), rows_of(folder / "ddp"))
    weights, wanted = (
        load_checkpoint(folder / name / "checkpoints" / "last.ckpt").model.state_dict()
        for name in ("resumed-fsdp", "ddp")
    )
    assert_close(weights, wanted)


def test_two_processes_resume_to_the_same_bits(folder):
    """Stopped within an epoch: the rows of the run that was not."""
    assert rows_of(folder / "resumed-ddp") == rows_of(folder / "ddp")


def test_another_number_of_processes_does_not_continue_a_run(folder, tiny_config):
    """Steps and batches would be others."""
    config = tiny_config(folder / "ddp", **SETTINGS, **{"data.batch_size": 2})
    with pytest.raises(InputError, match="with 1 processes: it was begun with 2"):
        train(config, resume=True, progress=False)


def test_weights_and_frequencies_are_equal_in_all_processes(folder):
    """Compared bit by bit after each epoch, redraws included."""
    assert told(folder)["epochs with equal weights and frequencies"] == "3"


def test_only_the_first_process_writes(folder):
    """One file of events, one row an epoch."""
    assert len(list((folder / "ddp" / "tensorboard").glob("events.*"))) == 1
    assert len(rows_of(folder / "ddp")) == 3


def test_all_processes_stop_at_a_step_that_is_not_finite_in_one(folder):
    """They name the systems of the process at fault, which alone saves its step."""
    said = told(folder)
    assert said["processes that say the same of the bad step"] == "2"
    assert "1004" in said["what they say"]
    [path] = (folder / "nonfinite" / "nonfinite").iterdir()
    assert str(path) in said["what they say"]


def test_a_process_that_dies_ends_the_run_with_an_error(tiny_config, tmp_path):
    """Within a minute, though the other waits for it."""
    save_config(tiny_config(tmp_path / "unused", **SETTINGS), tmp_path / "config.yaml")
    done = torchrun(tmp_path / "config.yaml", tmp_path / "run", "die", timeout=90)
    assert done.returncode != 0
    assert "SIGKILL" in done.stderr


def test_two_processes_start_without_a_launcher(folder, tiny_config):
    """`training.devices` alone makes the command start the second; the curve is torchrun's."""
    settings = SETTINGS | {"data.max_atoms": 37, "training.devices": 2}
    save_config(tiny_config(folder / "alone", **settings), folder / "alone.yaml")
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "molflt", "train", str(folder / "alone.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)
    assert done.returncode == 0, done.stderr[-5000:]
    assert done.stdout.count("best checkpoint") == 1
    assert_same_curve(rows_of(folder / "alone"), rows_of(folder / "budget"))


@pytest.mark.parametrize(
    ("environment", "first"),
    [
        ({}, True),
        ({"RANK": "0", "LOCAL_RANK": "0"}, True),
        ({"RANK": "2", "LOCAL_RANK": "0"}, False),
        ({"LOCAL_RANK": "1"}, False),
        ({"NODE_RANK": "1"}, False),
        ({"SLURM_PROCID": "3"}, False),
    ],
)
def test_the_first_process_is_known_before_the_others_are_met(monkeypatch, environment, first):
    """From what launchers, and Lightning, set."""
    for name in ("RANK", "LOCAL_RANK", "NODE_RANK", "SLURM_PROCID", "JSM_NAMESPACE_RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert is_first_process() == first


@pytest.mark.parametrize(
    ("environment", "settings", "message"),
    [
        (
            {"TORCHELASTIC_RUN_ID": "a", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"},
            {"training.devices": 3},
            r"torchrun started 2 processes \(WORLD_SIZE\), .* are 3 x 1; leave both settings null",
        ),
        (
            {"SLURM_NTASKS": "6", "SLURM_NTASKS_PER_NODE": "3", "SLURM_NNODES": "2"},
            {"training.devices": 5},
            r"srun started 6 processes \(SLURM_NTASKS\), .* are 5 x 2; .*--ntasks-per-node",
        ),
        ({"SLURM_NTASKS": "2"}, {}, r"srun started 2 processes .* are 1 x 1"),
        ({"SLURM_NTASKS": "2"}, {"training.devices": 2}, "without --ntasks-per-node"),
    ],
)
def test_another_number_of_processes_than_launched_is_refused(
    monkeypatch, tiny_config, tmp_path, environment, settings, message
):
    """Before anything is written."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InputError, match=message):
        train(tiny_config(tmp_path / "run", **settings), progress=False)
    assert list(tmp_path.iterdir()) == []


def test_torchrun_within_a_slurm_job_says_which_process_is_which(monkeypatch, tiny_config, tmp_path):
    """Rank 5 of 6, in the job's task 1 of 2."""
    said = {"TORCHELASTIC_RUN_ID": "a", "RANK": 5, "LOCAL_RANK": 2, "GROUP_RANK": 1, "WORLD_SIZE": 6}
    said |= {"LOCAL_WORLD_SIZE": 3, "GROUP_WORLD_SIZE": 2, "MASTER_ADDR": "localhost", "MASTER_PORT": 29517}
    said |= {"SLURM_NTASKS": 2, "SLURM_NTASKS_PER_NODE": 1, "SLURM_PROCID": 1, "SLURM_LOCALID": 0}
    for name, value in said.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(rank_zero_only, "rank", 0)
    config = tiny_config(tmp_path / "run")
    check_launch(config)
    trainer = make_trainer(config, "cpu", "32-true", [], [])
    assert (trainer.global_rank, trainer.world_size) == (5, 6)
