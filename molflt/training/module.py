"""One training step, its optimiser and its metrics, as a LightningModule."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor
from torch.nn import ModuleList
from torch.nn.utils import clip_grads_with_norm_
from torch.optim import Optimizer
from torch_geometric.data import Data
from torchmetrics import MeanMetric, Metric

from molflt.checkpoint import CheckpointMetadata, checkpoint_section
from molflt.config import Config
from molflt.errors import InputError
from molflt.metrics import EnergyMAE, EnergyWithinThreshold
from molflt.models.graphormer3d import Graphormer3D
from molflt.nn.frequencies import resample_
from molflt.training.averaging import WeightAverage
from molflt.training.nonfinite import NonFiniteStep, describe, gather, gradient_norm, stop_at
from molflt.training.objective import linear_weight
from molflt.training.optimizers import build_optimizer, build_schedule
from molflt.training.seeds import redraw_generator, seed_step
from molflt.training.sharding import shard, whole
from molflt.training.step import Shares, StepResult, free_atoms, shares_of, step_result


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
        # Sharded weights are put together in each forward, by all processes: so each validates on everything.
        alone = config.training.strategy == "fsdp"
        splits = config.data.val_splits
        self.val_mae = ModuleList(EnergyMAE(sync_on_compute=not alone) for _ in splits)
        self.val_ewt = ModuleList(EnergyWithinThreshold(sync_on_compute=not alone) for _ in splits)
        self.val_metrics: dict[str, float] = {}
        self._epoch_start = 0.0
        self.validated = False
        self._total_steps = 1
        self._resumed: Mapping[str, Any] | None = None
        self._step: tuple[Data, Shares, float, StepResult] | None = None
        self.skipped: list[str] = []
        """What was wrong with each step that was left out."""
        self.prepare_data_per_node = False
        self.open_output: Callable[[], None] | None = None
        """Called in the first process, before anything is written, once all processes have met."""

    def prepare_data(self) -> None:
        if self.open_output is not None:
            self.open_output()

    def configure_optimizers(self) -> Any:
        optim = self.config.optim
        self._total_steps = int(self.trainer.estimated_stepping_batches)
        fused = self.config.training.precision == 32
        optimizer = build_optimizer(self.model.parameters(), optim, fused)
        schedule = build_schedule(optimizer, optim, self._total_steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def configure_model(self) -> None:
        if not isinstance(self.trainer.strategy, ModelParallelStrategy):
            return
        assert self.device_mesh is not None
        shard(self.model, self.device_mesh["data_parallel"])

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
            "skipped": list(self.skipped),
            "seconds": time.perf_counter() - self._epoch_start,
        }

    def load_training_state(self, state: Mapping[str, Any]) -> None:
        """Take over what `training_state` gave; the rest of it once training starts."""
        self.val_metrics = dict(state["val_metrics"])
        self.skipped = list(state["skipped"])
        self._resumed = state

    def _take_up(self, state: Mapping[str, Any]) -> None:
        if self.average is not None and state["average"] is not None:
            self.average.load_state(state["average"])
        if self.global_rank == 0:
            for name, metric in self._train_metrics().items():
                for key, value in state["metrics"][name].items():
                    setattr(metric, key, value.to(self.device))
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
        shares = shares_of(batch, self.trainer.world_size, self._is_repeated(batch_idx))
        weight = linear_weight(self.global_step, self._total_steps, self.config.optim.delta_pos_weight)
        result = step_result(self.model, batch, weight, shares)
        self._step = (batch, shares, weight, result)
        return result.loss

    def _is_repeated(self, batch_idx: int) -> bool:
        """Whether this process has no batch of its own left in the epoch's last step."""
        loader = self.trainer.train_dataloader
        assert loader is not None
        is_last = batch_idx == len(loader) - 1
        return self.trainer.world_size > 1 and is_last and loader.batch_sampler.share(batch_idx) == 0

    def configure_gradient_clipping(
        self,
        optimizer: Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        parameters = [value for value in self.model.parameters() if value.grad is not None]
        norm = gradient_norm(parameters)
        if not whole(norm).isfinite():
            self._refuse_step(optimizer)
            return
        if gradient_clip_val:
            clip_grads_with_norm_(parameters, gradient_clip_val, norm)
        self._count_step()

    def _count_step(self) -> None:
        """Take the step's errors into the epoch's metrics."""
        assert self._step is not None
        batch, shares, _, result = self._step
        counted = len(batch.y_relaxed) if shares.systems else 0
        self.train_mae.update(result.energy[:counted], batch.y_relaxed[:counted].to(result.energy.dtype))
        self.train_loss.update(result.loss.detach(), shares.systems_per_process)
        if result.delta_pos_mae is not None:
            self.train_delta_pos_mae.update(
                result.delta_pos_mae, free_atoms(batch).sum() if shares.systems else 0
            )
        self._step = None

    def _refuse_step(self, optimizer: Optimizer) -> None:
        """Stop at, or leave out, a step whose gradient is not finite; all processes see that it is not."""
        assert self._step is not None
        batch, shares, weight, result = self._step
        own = NonFiniteStep(self.global_step, self.global_rank, result.loss.item(), batch.sid.tolist())
        steps = gather(own)
        if getattr(self.trainer.precision_plugin, "scaler", None) and all(s.loss_is_finite for s in steps):
            # In fp16 gradients overflow now and then; the scaler leaves the step out and lowers its scale.
            self._count_step()
            return
        what = describe(steps)
        weights = {name: whole(value) for name, value in self.model.state_dict().items()}
        if self.config.training.on_nonfinite == "stop":
            stop_at(steps, own, self.config, batch, weights, weight, shares)
        if not all(value.isfinite().all() for value in weights.values()):
            raise InputError(f"{what}, and so are weights; no later step can mend that: lower optim.lr")
        optimizer.zero_grad(set_to_none=True)
        self.skipped.append(what)
        self._step = None

    def on_train_batch_end(self, outputs: Any, batch: Data, batch_idx: int) -> None:
        if self.average is not None:
            self.average.update()

    def on_validation_start(self) -> None:
        if self.average is not None:
            self.average.exchange()

    def validation_step(self, batch: Data, batch_idx: int, dataloader_idx: int = 0) -> None:
        # In full precision, as evaluation and prediction are: the same weights get the same score.
        with torch.autocast(self.device.type, enabled=False):
            energy = self.model(batch).energy
        loaders = self.trainer.val_dataloaders
        assert loaders is not None
        # A process without a batch of its own has one of another's, as all have to take part in the sums.
        counted = len(energy) if loaders[dataloader_idx].batch_sampler.share(batch_idx) else 0
        target = batch.y_relaxed.to(energy.dtype)
        for metric in self._val_metrics_of(dataloader_idx):
            metric.update(energy[:counted], target[:counted])

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
            checkpoint["state_dict"] = {name: whole(value) for name, value in self.state_dict().items()}
            self.average.exchange()
        metadata = replace(
            self.metadata,
            epoch=self.current_epoch + 1,
            step=self.global_step,
            val_metrics=dict(self.val_metrics),
        )
        checkpoint["molflt"] = checkpoint_section(self.config, metadata)
