"""The picture of a run's metrics."""

import math

import pytest
from PIL import Image

from molflt.training.curves import draw_curves, read_metrics


def test_the_picture_shows_every_metric_where_it_is_known(finished_run):
    """Loss and learning rate of all 5 epochs; the error of a split at its 3 validations."""
    metrics = read_metrics(finished_run.output / "metrics.csv")
    assert [math.isnan(value) for value in metrics["val_a/energy_mae"]] == [True, False, True, False, False]
    left, right, rate = draw_curves(metrics).axes
    [loss] = left.get_lines()
    assert loss.get_xydata().tolist() == [[n + 1, value] for n, value in enumerate(metrics["train/loss"])]
    [line] = rate.get_lines()
    assert line.get_ydata().tolist() == metrics["lr"]
    curves = {line.get_label(): line.get_xydata().tolist() for line in right.get_lines()}
    assert curves.keys() == {"train", "val_a", "val_b"}
    assert [epoch for epoch, _ in curves["val_b"]] == [2, 4, 5]
    assert curves["val_a"][-1][1] == pytest.approx(finished_run.last_energy_mae)


def test_a_run_leaves_the_picture(finished_run):
    """A PNG of the size asked for."""
    with Image.open(finished_run.output / "loss.png") as image:
        assert (image.format, image.size) == ("PNG", (1200, 480))
