"""The Lightning trainer of a configuration: devices and processes, loggers, checkpoints."""

from __future__ import annotations

import importlib.util
import inspect
import logging
import math
import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.fabric.utilities.warnings import PossibleUserWarning
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import Logger, TensorBoardLogger
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.profilers import Profiler
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, Strategy
from torch.nn.parallel import DistributedDataParallel

from molflt.archive import read_archive, write_atomically
from molflt.config import Config
from molflt.errors import InputError
from molflt.training.metrics_csv import MetricsCsv, metric_names


class AtomicCheckpointIO(TorchCheckpointIO):
    """Lightning's checkpoint files, each whole or absent even where a run is killed, of plain values only."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        write_atomically(checkpoint, path)

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> Any:
        return dict(read_archive(Path(path)))


class LastEpochValidation(Callback):
    """Validates after the last epoch even where it is no multiple of `training.validate_every`."""

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        # A run that is taken up within an epoch does not start that epoch again.
        self.on_train_epoch_start(trainer, pl_module)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: Any) -> None:
        if trainer.current_epoch + 1 == trainer.max_epochs:
            trainer.check_val_every_n_epoch = 1


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """Hold back Lightning's greetings, and warnings that a user of molflt can do nothing about."""
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.WARNING)
    try:
        with warnings.catch_warnings():
            # Samples are in memory: workers would only copy them.
            warnings.filterwarnings("ignore", ".*does not have many workers", PossibleUserWarning)
            # The batch sampler is told where to go on.
            warnings.filterwarnings("ignore", ".*your dataloader is not resumable", PossibleUserWarning)
            # That of the run that goes on.
            warnings.filterwarnings("ignore", "Checkpoint directory .* exists and is not empty", UserWarning)
            # All processes log the value over all systems.
            warnings.filterwarnings("ignore", ".*sync_dist=True", PossibleUserWarning)
            # The output is used out of place.
            warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor", UserWarning)
            # In fp16 the scaler leaves out steps whose gradients overflow, the first among them.
            warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step", UserWarning)
            # Lightning's own use of a torch class that torch is about to drop.
            warnings.filterwarnings("ignore", ".*LeafSpec.* is deprecated", FutureWarning)
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def resolve_accelerator(config: Config) -> str:
    """`gpu` or `cpu`; `InputError` for a GPU that is not there."""
    accelerator = config.training.accelerator
    if accelerator == "auto":
        return "gpu" if torch.cuda.is_available() else "cpu"
    if accelerator == "gpu" and not torch.cuda.is_available():
        raise InputError("training.accelerator is gpu, but torch finds no CUDA GPU; use auto or cpu")
    return accelerator


def launched(config: Config) -> tuple[int, int]:
    """Processes per node and nodes: as configured, else as torchrun or srun set them, else 1."""

    def number(setting: int | None, *variables: str) -> int:
        found = (os.environ.get(name, "") for name in variables)
        return setting or next((int(value) for value in found if value.isdigit()), 1)

    return (
        number(config.training.devices, "LOCAL_WORLD_SIZE", "SLURM_NTASKS_PER_NODE"),
        number(config.training.num_nodes, "GROUP_WORLD_SIZE", "SLURM_NNODES"),
    )


def check_launch(config: Config) -> None:
    """Raise `InputError` where a launcher started another number of processes than the configuration says."""
    launcher = variable = ""
    if _by_torchrun():
        launcher, variable = "torchrun", "WORLD_SIZE"
    elif os.environ.get("SLURM_JOB_NAME") not in ("bash", "interactive"):
        launcher, variable = "srun", "SLURM_NTASKS"
    started = os.environ.get(variable, "")
    if not started.isdigit():
        return
    devices, num_nodes = launched(config)
    if devices * num_nodes != int(started):
        remedy = " (for srun: --nodes and --ntasks-per-node)" if launcher == "srun" else ""
        raise InputError(
            f"{launcher} started {started} processes ({variable}), and training.devices x training.num_nodes "
            f"are {devices} x {num_nodes}; leave both settings null, or start as many{remedy}"
        )
    if launcher == "srun" and int(started) > 1 and not os.environ.get("SLURM_NTASKS_PER_NODE"):
        raise InputError(f"srun started {started} processes without --ntasks-per-node; give it that")


def _by_torchrun() -> bool:
    """Also within a SLURM job, whose variables then count tasks that are no processes of the training."""
    return torch.distributed.is_available() and torch.distributed.is_torchelastic_launched()


def make_strategy(config: Config, num_processes: int) -> Strategy | str:
    """Lightning's strategy for so many processes."""
    if config.training.strategy == "fsdp":
        return ModelParallelStrategy(
            data_parallel_size=num_processes, tensor_parallel_size=1, save_distributed_checkpoint=False
        )
    if num_processes == 1:
        return "auto"
    # All processes draw the same frequencies, so there is nothing to broadcast, and validation, in which they
    # may have different numbers of batches, needs no communication.
    # torch has another name for it from 2.13 on.
    known = inspect.signature(DistributedDataParallel.__init__).parameters
    sync = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
    options: dict[str, Any] = {sync: False}
    return DDPStrategy(**options)


def check_loggers(config: Config) -> None:
    """Raise `InputError` where Weights & Biases is asked for and is not installed."""
    if config.training.wandb and importlib.util.find_spec("wandb") is None:
        raise InputError(
            "training.wandb is set, but Weights & Biases is not installed; pip install wandb, or leave it out"
        )


def make_loggers(config: Config, output: Path, first_step: int) -> list[Logger]:
    """metrics.csv and what else is asked for; one that goes on at `first_step` logs anew what came after."""
    loggers: list[Logger] = [MetricsCsv(output / "metrics.csv", metric_names(config))]
    if config.training.tensorboard:
        purge: dict[str, Any] = {"purge_step": first_step + 1} if first_step else {}
        loggers.append(
            TensorBoardLogger(output, name="tensorboard", version="", default_hp_metric=False, **purge)
        )
    if config.training.wandb:
        from lightning.pytorch.loggers import WandbLogger

        loggers.append(WandbLogger(project=config.training.wandb, save_dir=output, name=output.name))
    return loggers


def make_trainer(
    config: Config,
    accelerator: str,
    precision: Any,
    loggers: Sequence[Logger],
    callbacks: Sequence[Callback],
    profiler: Profiler | None = None,
) -> Trainer:
    """The trainer, on the devices and with the strategy of `config.training`."""
    clip = config.optim.grad_clip
    devices, num_nodes = launched(config)
    plugins: list[Any] = [AtomicCheckpointIO()]
    if not _by_torchrun() and SLURMEnvironment.detect():
        # A job that is queued again continues with --resume.
        plugins.append(SLURMEnvironment(auto_requeue=False))
    return Trainer(
        accelerator=accelerator,
        devices=devices,
        num_nodes=num_nodes,
        strategy=make_strategy(config, devices * num_nodes),
        max_epochs=config.training.epochs,
        check_val_every_n_epoch=config.training.validate_every,
        precision=precision,
        gradient_clip_val=clip if clip < math.inf else None,
        logger=list(loggers),
        callbacks=list(callbacks),
        plugins=plugins,
        profiler=profiler,
        log_every_n_steps=1,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
        # Lightning would add checkpoints of its own, in the working directory.
        enable_checkpointing=any(isinstance(callback, ModelCheckpoint) for callback in callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def checkpoint_callbacks(config: Config, output: Path) -> tuple[ModelCheckpoint, ModelCheckpoint]:
    """What writes best.ckpt and last.ckpt at each validation."""
    monitor = f"{config.data.val_splits[0]}/energy_mae"
    common: dict[str, Any] = {
        "dirpath": output / "checkpoints",
        "save_weights_only": True,
        "save_on_train_epoch_end": False,
        "enable_version_counter": False,
    }
    best = ModelCheckpoint(filename="best", monitor=monitor, mode="min", **common)
    last = ModelCheckpoint(filename="last", monitor=None, **common)
    return best, last
