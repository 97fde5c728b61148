"""The progress bar on a terminal."""

import io

from rich.console import Console

from molflt.training import run, train
from molflt.training.progress import TrainingProgress


def test_a_terminal_gets_a_bar_that_ends_with_the_last_epochs_figures(tiny_config, tmp_path, monkeypatch):
    """Epoch, MAE of both kinds of splits in eV, speed; all steps done when the last validation is shown."""
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, force_jupyter=False, width=160, color_system=None)
    bars = []

    def make():
        bars.append(TrainingProgress(console))
        return bars[0]

    monkeypatch.setattr(run, "TrainingProgress", make)
    result = train(tiny_config(tmp_path / "run", **{"training.epochs": 2}))
    last_line = stream.getvalue().replace("\r", "\n").split("\n")[-2]
    assert "epoch 2/2" in last_line
    assert f"val_a {result.best_energy_mae:.3f}" in last_line
    assert " eV " in last_line
    assert "systems/s" in last_line
    [task] = bars[0]._bar.tasks
    assert (task.completed, task.total) == (6, 6)
