"""Progress of a whole training run: one bar with the energy MAE in eV, or one line per validation."""

from __future__ import annotations

import time
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from molflt.training.module import RelaxedEnergyTraining

REFRESH_SECONDS = 0.25


class TrainingProgress(Callback):
    """Shows the epoch, the MAE of the training and validation splits, systems per second and the time left.

    On a terminal that is a bar over all steps; elsewhere (a log file, a notebook) a line per validation.
    """

    def __init__(self, console: Console | None = None) -> None:
        super().__init__()
        self.console = console or Console(stderr=True)
        self.live = self.console.is_terminal and not self.console.is_jupyter
        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=None),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self.console,
            expand=True,
        )
        self._task = TaskID(0)
        self._systems = 0
        self._seconds = 0.0
        self._batch_start = 0.0
        self._shown = 0.0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._task = self._bar.add_task("", total=trainer.estimated_stepping_batches)
        if self.live and trainer.is_global_zero:
            self._bar.start()

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._batch_start = time.perf_counter()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        now = time.perf_counter()
        # As many in each process, about.
        self._systems += batch.num_graphs * trainer.world_size
        self._seconds += now - self._batch_start
        if self.live and now - self._shown > REFRESH_SECONDS:
            assert isinstance(pl_module, RelaxedEnergyTraining)
            self._shown = now
            self._refresh(trainer, pl_module, pl_module.train_mae_so_far)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, RelaxedEnergyTraining)
        # Over all processes, which are all here.
        train_mae = float(pl_module.train_mae.compute())
        if self.live:
            self._refresh(trainer, pl_module, train_mae)
        elif pl_module.validated and trainer.is_global_zero:
            line = self.describe(trainer, pl_module, train_mae)
            self.console.print(line, highlight=False, markup=False, soft_wrap=True)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._stop()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._stop()

    def _stop(self) -> None:
        # Off a terminal there is nothing to end, and some versions of rich would write an empty line.
        if self.live:
            self._bar.stop()

    def describe(self, trainer: Trainer, module: RelaxedEnergyTraining, train_mae: float) -> str:
        """The state of the run in one line of text; `train_mae` is the epoch's so far, eV."""
        maes = [f"train {train_mae:.3f}"]
        for split in module.config.data.val_splits:
            if f"{split}/energy_mae" in module.val_metrics:
                maes.append(f"{split} {module.val_metrics[f'{split}/energy_mae']:.3f}")
        speed = self._systems / self._seconds if self._seconds else 0.0
        return (
            f"epoch {trainer.current_epoch + 1}/{trainer.max_epochs}  MAE {'  '.join(maes)} eV  "
            f"{speed:.0f} systems/s"
        )

    def _refresh(self, trainer: Trainer, module: RelaxedEnergyTraining, train_mae: float) -> None:
        description = self.describe(trainer, module, train_mae)
        self._bar.update(self._task, completed=trainer.global_step, description=description)
