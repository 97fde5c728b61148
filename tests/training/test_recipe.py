"""The parts of the recipe together: budgets, augmentation, optimiser, schedule and precision in one run."""

import csv

import torch

from molflt.checkpoint import load_checkpoint
from molflt.training import train

RECIPE = {
    "data.max_atoms": 40,
    "data.interpolate_fraction": 0.5,
    "data.noise_std": 0.1,
    "data.random_rotation": "any",
    "optim.optimizer": "adam",
    "optim.schedule": "polynomial",
    "optim.power": 2.0,
    "training.precision": "bf16",
    "training.epochs": 2,
    "data.val_splits": "[val_b]",
}


def run(tiny_config, output, **settings):
    result = train(tiny_config(output, **RECIPE | settings), progress=False)
    with (output / "metrics.csv").open(encoding="utf-8", newline="") as file:
        return load_checkpoint(result.last_checkpoint).model.state_dict(), list(csv.DictReader(file))


def test_a_run_with_everything_on_repeats_bit_for_bit_with_and_without_workers(tiny_config, tmp_path):
    """Who reads the samples, and from where, plays no part; leaving the augmentation out does."""
    weights, rows = run(tiny_config, tmp_path / "alone")
    helped, _ = run(tiny_config, tmp_path / "helped", **{"data.num_workers": 2, "training.cache_gib": 0})
    plain, _ = run(tiny_config, tmp_path / "plain", **{"data.interpolate_fraction": 0.0})
    assert all(torch.equal(value, helped[name]) for name, value in weights.items())
    assert not all(torch.equal(value, plain[name]) for name, value in weights.items())
    steps = [int(row["step"]) for row in rows]
    assert steps[1] == 2 * steps[0]
    # Reached one step after the last, when the rate is logged.
    assert float(rows[-1]["lr"]) == 0.0


def test_augmentation_leaves_the_scales_of_the_targets_alone(tiny_config, tmp_path):
    """They are measured on the structures as they are, whatever training makes of them."""
    augmented, _ = run(tiny_config, tmp_path / "augmented", **{"training.epochs": 1})
    settings = {"training.epochs": 1, "data.interpolate_fraction": 0.0, "data.random_rotation": "none"}
    plain, _ = run(tiny_config, tmp_path / "plain", **settings)
    for name in ("energy_mean", "energy_std", "delta_pos_std"):
        assert torch.equal(augmented[name], plain[name])
