"""One training step, its optimiser and its metrics, as a LightningModule."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.nn import ModuleList
from torch_geometric.data import Data
from torchmetrics import MeanMetric, Metric

from molflt.checkpoint import CheckpointMetadata, checkpoint_section
from molflt.config import Config
from molflt.errors import InputError
from molflt.metrics import EnergyMAE, EnergyWithinThreshold
from molflt.models.graphormer3d import Graphormer3D
from molflt.nn.frequencies import resample_
from molflt.training.averaging import WeightAverage
from molflt.training.objective import delta_pos_loss, energy_loss, linear_weight
from molflt.training.optimizers import build_optimizer, build_schedule
from molflt.training.seeds import redraw_generator, seed_step


def metric_names(config: Config) -> list[str]:
    """Names of what a run logs per epoch, in order; validation metrics only where the epoch is validated."""
    names = ["epoch", "lr", "seconds", "train/loss", "train/energy_mae"]
    if any(config.optim.delta_pos_weight):
        names.append("train/delta_pos_mae")
    return names + [f"{split}/{name}" for split in config.data.val_splits for name in ("energy_mae", "ewt")]


class RelaxedEnergyTraining(LightningModule):
    """Trains a Graphormer-3D on relaxed energies and, with a non-zero weight, on Δpos.

    The network is `self.model`. With `optim.ema_decay` the averaged weights are in it during validation and
    in every checkpoint, whose `molflt` entry is made here.
    """

    def __init__(self, config: Config, model: Graphormer3D, metadata: CheckpointMetadata) -> None:
        super().__init__()
        self.config = config
        self.model = model
        self.metadata = metadata
        self.average: WeightAverage | None = None
        self.train_mae = EnergyMAE()
        self.train_loss = MeanMetric()
        self.train_delta_pos_mae = MeanMetric()
        self.val_mae = ModuleList(EnergyMAE() for _ in config.data.val_splits)
        self.val_ewt = ModuleList(EnergyWithinThreshold() for _ in config.data.val_splits)
        self.val_metrics: dict[str, float] = {}
        self._epoch_start = 0.0
        self.validated = False
        self._total_steps = 1
        self._resumed: Mapping[str, Any] | None = None

    def configure_optimizers(self) -> Any:
        optim = self.config.optim
        self._total_steps = int(self.trainer.estimated_stepping_batches)
        fused = self.config.training.precision == 32
        optimizer = build_optimizer(self.model.parameters(), optim, fused)
        schedule = build_schedule(optimizer, optim, self._total_steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_train_start(self) -> None:
        # Not before, as the weights have just moved to their device.
        if decay := self.config.optim.ema_decay:
            self.average = WeightAverage(self.model.parameters(), decay)
        if self._resumed is not None:
            self._take_up(self._resumed)
            self._resumed = None

    def training_state(self) -> dict[str, Any]:
        """What the steps to come depend on beyond weights and optimiser, in plain values and tensors.

        Sums of the epoch's metrics are over all ranks, so all ranks call this at the same time.
        """
        sums = {}
        for name, metric in self._train_metrics().items():
            metric.sync()
            states = metric.metric_state.items()
            sums[name] = {key: value.clone() for key, value in states if isinstance(value, Tensor)}
            if metric._is_synced:
                metric.unsync()
        return {
            "average": None if self.average is None else self.average.state(),
            "metrics": sums,
            "val_metrics": dict(self.val_metrics),
            "seconds": time.perf_counter() - self._epoch_start,
        }

    def load_training_state(self, state: Mapping[str, Any]) -> None:
        """Take over what `training_state` gave, once training starts."""
        self._resumed = state

    def _take_up(self, state: Mapping[str, Any]) -> None:
        if self.average is not None and state["average"] is not None:
            self.average.load_state(state["average"])
        if self.global_rank == 0:
            for name, metric in self._train_metrics().items():
                for key, value in state["metrics"][name].items():
                    setattr(metric, key, value.to(self.device))
        self.val_metrics = dict(state["val_metrics"])
        self._epoch_start = time.perf_counter() - state["seconds"]

    def _train_metrics(self) -> dict[str, Metric]:
        return {
            "energy_mae": self.train_mae,
            "loss": self.train_loss,
            "delta_pos_mae": self.train_delta_pos_mae,
        }

    @property
    def train_mae_so_far(self) -> float:
        """Energy MAE of the epoch so far on this rank alone, eV: no rank waits for another."""
        return float(self.train_mae.error_sum / self.train_mae.count)

    def on_train_epoch_start(self) -> None:
        self._epoch_start = time.perf_counter()
        self.validated = False

    def on_train_batch_start(self, batch: Data, batch_idx: int) -> None:
        seed, step, every = self.config.seed, self.global_step, self.config.training.redraw_every
        if every and step and step % every == 0:
            resample_(self.model, redraw_generator(seed, step))
        seed_step(seed, self.global_rank, step)

    def training_step(self, batch: Data, batch_idx: int) -> Tensor:
        energy, delta_pos = self.model(batch)
        target = batch.y_relaxed.to(energy.dtype)
        loss = energy_loss(energy, target, self.model.energy_std)
        if delta_pos is not None:
            loss = loss + self._delta_pos_weight() * self._delta_pos_loss(delta_pos, batch)
        if not torch.isfinite(loss):
            raise InputError(
                f"the loss of step {self.global_step} is {loss.item()} (sids {batch.sid.tolist()}); "
                "lower optim.lr or look at these records"
            )
        self.train_mae.update(energy, target)
        self.train_loss.update(loss.detach(), batch.num_graphs)
        return loss

    def _delta_pos_loss(self, delta_pos: Tensor, batch: Data) -> Tensor:
        fixed = batch.get("fixed")
        if fixed is None:
            fixed = torch.zeros_like(batch.atomic_numbers, dtype=torch.bool)
        std = self.model.delta_pos_std
        loss = delta_pos_loss(delta_pos, batch.delta_pos, fixed, std)
        if torch.isfinite(loss):
            self.train_delta_pos_mae.update(loss.detach() * std, (~fixed).sum())
        return loss

    def _delta_pos_weight(self) -> float:
        return linear_weight(self.global_step, self._total_steps, self.config.optim.delta_pos_weight)

    def on_train_batch_end(self, outputs: Any, batch: Data, batch_idx: int) -> None:
        if self.average is not None:
            self.average.update()

    def on_validation_start(self) -> None:
        if self.average is not None:
            self.average.exchange()

    def validation_step(self, batch: Data, batch_idx: int, dataloader_idx: int = 0) -> None:
        energy = self.model(batch).energy
        target = batch.y_relaxed.to(energy.dtype)
        for metric in self._val_metrics_of(dataloader_idx):
            metric.update(energy, target)

    def on_validation_epoch_end(self) -> None:
        for number, split in enumerate(self.config.data.val_splits):
            mae, ewt = self._val_metrics_of(number)
            self.val_metrics[f"{split}/energy_mae"] = float(mae.compute())
            self.val_metrics[f"{split}/ewt"] = float(ewt.compute())
            mae.reset()
            ewt.reset()
        self.validated = True
        # For the choice of the best checkpoint; the loggers get one row per epoch, below. A Python float
        # would become float32 on the way.
        self.log_dict(
            {name: torch.tensor(value, dtype=torch.float64) for name, value in self.val_metrics.items()},
            logger=False,
        )

    def _val_metrics_of(self, number: int) -> tuple[EnergyMAE, EnergyWithinThreshold]:
        mae, ewt = self.val_mae[number], self.val_ewt[number]
        assert isinstance(mae, EnergyMAE)
        assert isinstance(ewt, EnergyWithinThreshold)
        return mae, ewt

    def on_validation_end(self) -> None:
        if self.average is not None:
            self.average.exchange()

    def on_train_epoch_end(self) -> None:
        optimizer = self.optimizers(use_pl_optimizer=False)
        assert isinstance(optimizer, torch.optim.Optimizer)
        seconds = time.perf_counter() - self._epoch_start
        row = {
            "lr": optimizer.param_groups[0]["lr"],
            "train/loss": float(self.train_loss.compute()),
            "train/energy_mae": float(self.train_mae.compute()),
            "seconds": seconds,
        }
        if any(self.config.optim.delta_pos_weight):
            row["train/delta_pos_mae"] = float(self.train_delta_pos_mae.compute())
        for metric in self._train_metrics().values():
            metric.reset()
        if self.validated:
            row |= self.val_metrics
        for logger in self.trainer.loggers:
            logger.log_metrics({"epoch": self.current_epoch + 1, **row}, step=self.global_step)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if "optimizer_states" in checkpoint:
            # A state to continue from, which has the weights and their average; it is not for predicting.
            return
        if self.average is not None and not self.average.exchanged:
            self.average.exchange()
            checkpoint["state_dict"] = {name: value.clone() for name, value in self.state_dict().items()}
            self.average.exchange()
        metadata = replace(
            self.metadata,
            epoch=self.current_epoch + 1,
            step=self.global_step,
            val_metrics=dict(self.val_metrics),
        )
        checkpoint["molflt"] = checkpoint_section(self.config, metadata)
