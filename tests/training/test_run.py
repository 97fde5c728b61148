"""Whole training runs on toy systems: what they leave, what they refuse, and that they repeat."""

import csv
import errno
import signal

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.plugins.precision import MixedPrecision
from matplotlib.figure import Figure
from torch.amp import GradScaler

from molflt.archive import write_atomically
from molflt.checkpoint import load_checkpoint
from molflt.config import load_config
from molflt.data.datasets import OC20IS2RE
from molflt.data.lmdb_writer import write_lmdb
from molflt.errors import InputError
from molflt.evaluation import evaluate
from molflt.training import RelaxedEnergyTraining, run, train, trainer


def rows_of(output):
    with (output / "metrics.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def weights_of(checkpoint_path):
    return load_checkpoint(checkpoint_path).model.state_dict()


def test_a_run_folder_holds_configuration_metrics_checkpoints_and_events(finished_run, tiny_config):
    """Nothing else is left, and config.yaml trains the same again."""
    output = finished_run.output
    assert sorted(path.name for path in output.iterdir()) == [
        "checkpoints",
        "config.yaml",
        "loss.png",
        "metrics.csv",
        "tensorboard",
        "versions.json",
    ]
    assert sorted(path.name for path in (output / "checkpoints").iterdir()) == [
        "best.ckpt",
        "last.ckpt",
        "resume.ckpt",
    ]
    assert len(list((output / "tensorboard").glob("events.*"))) == 1
    assert load_config(output / "config.yaml") == tiny_config(output)


def test_metrics_has_a_row_per_epoch_and_validates_every_second_and_the_last(finished_run):
    """5 epochs of 3 steps: validation after the second, fourth and fifth; the learning rate ends at zero."""
    rows = rows_of(finished_run.output)
    assert [int(row["epoch"]) for row in rows] == [1, 2, 3, 4, 5]
    assert [int(row["step"]) for row in rows] == [3, 6, 9, 12, 15]
    assert [row["val_a/energy_mae"] != "" for row in rows] == [False, True, False, True, True]
    assert float(rows[-1]["lr"]) == pytest.approx(0.0, abs=1e-12)
    assert all(float(row["train/delta_pos_mae"]) > 0 for row in rows)


def test_saved_weights_are_those_that_were_validated(finished_run):
    """The metrics in the run, in its checkpoints and of a fresh evaluation agree, for best and last."""
    rows = [row for row in rows_of(finished_run.output) if row["val_a/energy_mae"]]
    best_row = min(rows, key=lambda row: float(row["val_a/energy_mae"]))
    assert finished_run.best_energy_mae == float(best_row["val_a/energy_mae"])
    for path, row in ((finished_run.best_checkpoint, best_row), (finished_run.last_checkpoint, rows[-1])):
        metadata = load_checkpoint(path).metadata
        assert (metadata.epoch, metadata.step) == (int(row["epoch"]), int(row["step"]))
        for score in evaluate(path):
            logged = float(row[f"{score.split}/energy_mae"])
            assert metadata.val_metrics[f"{score.split}/energy_mae"] == logged
            assert score.energy_mae == pytest.approx(logged, abs=1e-5)
            assert score.ewt == float(row[f"{score.split}/ewt"])


def test_saved_weights_are_the_average_of_the_trained_ones(tiny_config, tmp_path, monkeypatch):
    """With a step per epoch, a run without averaging saves the weights w_n of the recursion
    a_n = d_n a_(n-1) + (1 - d_n) w_n that one with averaging saves the a_n of."""
    saved = {0.0: [], 0.2: []}
    for decay, states in saved.items():

        def record(content, path, states=states):
            if str(path).endswith("last.ckpt"):
                states.append({name: value.clone() for name, value in content["state_dict"].items()})
            write_atomically(content, path)

        monkeypatch.setattr(trainer, "write_atomically", record)
        config = tiny_config(
            tmp_path / str(decay),
            **{"data.batch_size": 11, "data.val_splits": "[val_b]", "optim.ema_decay": decay},
            **{"training.validate_every": 1, "training.epochs": 4},
        )
        train(config, progress=False)
    assert len(saved[0.0]) == len(saved[0.2]) == 4
    for name, expected in saved[0.2][0].items():
        for number in (1, 2, 3):
            decay = min(0.2, (1 + number) / (10 + number))
            weight, average = saved[0.0][number][name], saved[0.2][number][name]
            expected = expected.lerp(weight, 1 - decay)
            torch.testing.assert_close(average, expected, rtol=0, atol=1e-7)
    changed = [not torch.equal(saved[0.0][3][name], saved[0.2][3][name]) for name in saved[0.2][3]]
    assert sum(changed) > len(changed) / 2


def test_metadata_describes_the_training_data(finished_run, toy_root):
    """Counts, elements, sizes and scales, equal to a direct reading; the scales are in the model."""
    checkpoint = load_checkpoint(finished_run.best_checkpoint)
    samples = list(OC20IS2RE(toy_root, "train"))
    energies = torch.cat([sample.y_relaxed for sample in samples]).double()
    metadata = checkpoint.metadata
    assert metadata.splits == {"train": 11, "val_a": 7, "val_b": 5}
    assert metadata.elements == sorted({z for sample in samples for z in sample.atomic_numbers.tolist()})
    assert metadata.num_atoms_range == [5, 17]
    assert metadata.energy_mean == pytest.approx(energies.mean().item(), abs=1e-9)
    assert metadata.energy_std == pytest.approx(energies.std(correction=0).item(), abs=1e-9)
    assert checkpoint.model.energy_mean.item() == pytest.approx(metadata.energy_mean, rel=1e-6)
    assert checkpoint.model.energy_std.item() == pytest.approx(metadata.energy_std, rel=1e-6)
    assert checkpoint.model.delta_pos_std.item() == pytest.approx(metadata.delta_pos_std, rel=1e-6)


def test_two_runs_of_one_seed_are_bit_identical(finished_run, tiny_config, tmp_path):
    """Weights and logged metrics repeat exactly, even from another random state; another seed differs."""
    torch.rand(17)
    again = train(tiny_config(tmp_path / "again"), progress=False)
    other = train(tiny_config(tmp_path / "other", seed=4), progress=False)
    first, second, third = (weights_of(result.last_checkpoint) for result in (finished_run, again, other))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not all(torch.equal(first[name], third[name]) for name in first)
    for row, row_again in zip(rows_of(finished_run.output), rows_of(again.output), strict=True):
        assert row | {"seconds": ""} == row_again | {"seconds": ""}


def test_redrawing_changes_frequencies_and_repeats(tiny_config, tmp_path):
    """With redraw_every the saved draws are no longer the first ones, and two runs still agree."""
    kept, redrawn, again = (
        weights_of(train(tiny_config(tmp_path / name, **settings), progress=False).last_checkpoint)
        for name, settings in (
            ("kept", {"training.epochs": 1}),
            ("redrawn", {"training.epochs": 1, "training.redraw_every": 2}),
            ("again", {"training.epochs": 1, "training.redraw_every": 2}),
        )
    )
    noise = [name for name in kept if name.endswith("base_noise")]
    assert noise
    assert not any(torch.equal(kept[name], redrawn[name]) for name in noise)
    assert all(torch.equal(redrawn[name], again[name]) for name in redrawn)


def test_training_learns(tiny_config, tmp_path):
    """100 steps on 11 systems halve the training error of the first epoch."""
    settings = {"training.epochs": 100, "training.validate_every": 100, "data.val_splits": "[val_b]"}
    settings |= {"optim.lr": 1e-2, "data.batch_size": 11}
    rows = rows_of(train(tiny_config(tmp_path / "run", **settings), progress=False).output)
    assert float(rows[-1]["train/energy_mae"]) < 0.5 * float(rows[0]["train/energy_mae"])


def test_energies_alone_train_without_relaxed_positions(tiny_config, toy_root, tmp_path):
    """A zero Δpos weight needs no pos_relaxed and makes no displacement head."""
    for split in ("train", "val_b"):
        records = [sample.to_dict() for sample in OC20IS2RE(toy_root, split)]
        for record in records:
            del record["pos_relaxed"]
        write_lmdb(tmp_path / split / "data.lmdb", records)
    settings = {"data.root": tmp_path, "data.val_splits": "[val_b]", "training.epochs": 1}
    with pytest.raises(InputError, match=r"has no pos_relaxed.*delta_pos_weight to \[0, 0\]"):
        train(tiny_config(tmp_path / "run", **settings), progress=False)
    settings["optim.delta_pos_weight"] = "[0, 0]"
    result = train(tiny_config(tmp_path / "run", **settings), progress=False)
    assert not any("displacement" in name for name in weights_of(result.best_checkpoint))
    assert "train/delta_pos_mae" not in rows_of(result.output)[0]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"data.root": "/no/such/data"}, "/no/such/data does not exist"),
        ({"data.train_split": "training"}, "no split 'training'; it has train, val_a, val_b"),
        ({"data.val_splits": "[val_a,val_c]"}, "no split 'val_c'"),
    ],
)
def test_missing_data_is_refused_before_a_run_folder_is_made(tiny_config, tmp_path, settings, message):
    """The error names what there is, and nothing is written."""
    with pytest.raises(InputError, match=message):
        train(tiny_config(tmp_path / "run", **settings), progress=False)
    assert list(tmp_path.iterdir()) == []


def test_a_gpu_that_is_not_there_is_refused_before_a_run_folder_is_made(tiny_config, tmp_path, monkeypatch):
    """Asked for by name, not by `auto`."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InputError, match=r"training\.accelerator is gpu"):
        train(tiny_config(tmp_path / "run", **{"training.accelerator": "gpu"}), progress=False)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_with_content_is_refused_and_left_alone(tiny_config, tmp_path):
    """Whether or not the data are there; the message names both remedies."""
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(
        InputError, match=r"is not empty; choose another --training\.output or add --overwrite"
    ):
        train(tiny_config(tmp_path, **{"data.root": "/no/such/data"}), progress=False)
    with pytest.raises(InputError, match="holds other files than a run's"):
        train(tiny_config(tmp_path), overwrite=True, progress=False)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_a_folder_that_cannot_be_made_is_an_input_error(tiny_config, tmp_path):
    """Its parent is a file."""
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(InputError, match=r"cannot write the run folder .*choose another --training\.output"):
        train(tiny_config(tmp_path / "notes.txt" / "run"), progress=False)


def test_loggers_are_as_asked_for(tiny_config, tmp_path, monkeypatch):
    """metrics.csv always, TensorBoard unless it is turned off; Weights & Biases has to be installed."""
    settings = {"training.epochs": 1, "data.val_splits": "[val_b]", "training.tensorboard": False}
    output = train(tiny_config(tmp_path / "run", **settings), progress=False).output
    assert len(rows_of(output)) == 1
    assert not (output / "tensorboard").exists()
    find_spec = trainer.importlib.util.find_spec
    monkeypatch.setattr(
        trainer.importlib.util, "find_spec", lambda name: None if name == "wandb" else find_spec(name)
    )
    with pytest.raises(InputError, match=r"Weights & Biases is not installed; pip install wandb"):
        train(tiny_config(tmp_path / "other", **settings | {"training.wandb": "flt"}), progress=False)
    assert not (tmp_path / "other").exists()


def test_overwrite_replaces_the_runs_files_and_no_others(tiny_config, tmp_path):
    """The second run's metrics have no rows of the first, and a user's own file stays."""
    settings = {"data.val_splits": "[val_b]", "training.epochs": 2}
    train(tiny_config(tmp_path, **settings), progress=False)
    (tmp_path / "notes.txt").write_text("mine")
    train(tiny_config(tmp_path, **settings), overwrite=True, progress=False)
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert len(rows_of(tmp_path)) == 2
    assert len(list((tmp_path / "tensorboard").glob("events.*"))) == 1


def test_failed_data_with_overwrite_leave_the_earlier_run(tiny_config, tmp_path):
    """The old run is deleted only when the new one can start."""
    result = train(tiny_config(tmp_path, **{"training.epochs": 1}), progress=False)
    before = result.best_checkpoint.read_bytes()
    with pytest.raises(InputError):
        train(tiny_config(tmp_path, **{"data.root": "/no/such/data"}), overwrite=True, progress=False)
    assert result.best_checkpoint.read_bytes() == before


def test_training_says_nothing_but_its_progress(tiny_config, tmp_path, capfd):
    """Without it, not a line; with it and no terminal, one line on the data, and one per validation with the
    MAE in eV."""
    settings = {"training.epochs": 3, "training.validate_every": 2}
    train(tiny_config(tmp_path / "silent", **settings), progress=False)
    assert capfd.readouterr() == ("", "")
    result = train(tiny_config(tmp_path / "told", **settings))
    out, err = capfd.readouterr()
    assert out == ""
    about_data, *lines = (line for line in err.splitlines() if line)
    assert about_data.startswith("molflt: statistics of the data: train measured on 11 systems; val_a ")
    assert [line.split("  MAE")[0] for line in lines] == ["epoch 2/3", "epoch 3/3"]
    mae = float(rows_of(result.output)[-1]["val_a/energy_mae"])
    assert f"val_a {mae:.3f}" in lines[-1]
    assert "eV" in lines[-1]


def test_global_random_states_are_left_alone(tiny_config, tmp_path):
    """A training in a notebook does not seed what comes after it."""
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    train(tiny_config(tmp_path / "run", **{"training.epochs": 1}), progress=False)
    assert torch.equal(torch.rand(3), expected)


def test_an_interrupt_is_raised_and_can_be_followed_by_another(tiny_config, tmp_path, monkeypatch):
    """Lightning's exit becomes KeyboardInterrupt, and the signal is not left ignored."""

    def interrupt(self, batch, batch_idx):
        raise KeyboardInterrupt

    handler = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(RelaxedEnergyTraining, "training_step", interrupt)
    with pytest.raises(KeyboardInterrupt):
        train(tiny_config(tmp_path / "run"), progress=False)
    assert signal.getsignal(signal.SIGINT) is handler


def test_half_precision_trains_weights_that_are_kept_in_float32(tiny_config, tmp_path):
    """Losses are close to float32's and not equal to them; validation is in float32, as evaluation is."""
    losses = {}
    for precision in (32, "bf16"):
        settings = {"training.precision": precision, "training.epochs": 1, "data.val_splits": "[val_a]"}
        result = train(tiny_config(tmp_path / str(precision), **settings), progress=False)
        assert not any(value.dtype == torch.bfloat16 for value in weights_of(result.last_checkpoint).values())
        losses[precision] = float(rows_of(result.output)[0]["train/loss"])
    assert 0 < abs(losses["bf16"] - losses[32]) < 0.02 * losses[32]
    score = next(score for score in evaluate(result.last_checkpoint) if score.split == "val_a")
    assert score.energy_mae == pytest.approx(float(rows_of(result.output)[0]["val_a/energy_mae"]), abs=1e-6)


def test_an_fp16_step_that_overflows_is_passed_over_in_silence(tiny_config, tmp_path, monkeypatch):
    """On a CPU, by a plugin that Lightning does not choose there: the scale falls until gradients fit."""
    plugin = MixedPrecision("16-mixed", "cpu", GradScaler("cpu", init_scale=2.0**40))

    def on_cpu(*, precision, plugins, **rest):
        return Trainer(plugins=[*plugins, plugin], **rest)

    monkeypatch.setattr(trainer, "Trainer", on_cpu)
    monkeypatch.setattr(run, "lightning_precision", lambda precision, accelerator: None)
    config = tiny_config(tmp_path / "run", **{"training.precision": "fp16", "training.epochs": 20})
    result = train(config, progress=False)
    assert result.skipped == []
    assert plugin.scaler.get_scale() < 2.0**40
    losses = [float(row["train/loss"]) for row in rows_of(result.output)]
    assert losses[-1] < 0.8 * losses[0]


def test_fp16_on_a_cpu_is_refused_before_a_run_folder_is_made(tiny_config, tmp_path):
    """Lightning would take bf16 in its place."""
    with pytest.raises(InputError, match=r"training\.precision is fp16, which takes a GPU"):
        train(tiny_config(tmp_path / "run", **{"training.precision": "fp16"}), progress=False)
    assert list(tmp_path.iterdir()) == []


def test_the_training_systems_are_described_within_the_budget(tiny_config, tmp_path, monkeypatch):
    """In batches that all fit, as those of training do."""
    sizes, measure_domain = [], run.measure_domain

    def recorded(model, samples, batch_size):
        sizes.append(batch_size * max(len(sample.pos) for sample in samples))
        return measure_domain(model, samples, batch_size)

    monkeypatch.setattr(run, "measure_domain", recorded)
    train(tiny_config(tmp_path / "run", **{"data.max_atoms": 23, "training.epochs": 1}), progress=False)
    assert sizes
    assert all(size <= 23 for size in sizes)


def test_a_picture_that_cannot_be_drawn_does_not_fail_a_finished_run(
    tiny_config, tmp_path, monkeypatch, capfd
):
    """It is said in one line, and the checkpoints are there."""

    def full(self, *arguments, **options):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Figure, "savefig", full)
    settings = {"training.epochs": 1, "data.val_splits": "[val_b]"}
    result = train(tiny_config(tmp_path / "run", **settings), progress=False)
    assert result.best_checkpoint.exists()
    out, err = capfd.readouterr()
    assert out == ""
    assert err == (
        f"molflt: cannot draw {tmp_path / 'run' / 'loss.png'}: [Errno 28] No space left on device; "
        "the run is complete\n"
    )
