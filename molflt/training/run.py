"""A training run from a configuration to a run folder."""

from __future__ import annotations

import logging
import math
import signal
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.warnings import PossibleUserWarning
from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.utilities.seed import isolate_rng
from torch_geometric.loader import DataLoader

from molflt.checkpoint import (
    CheckpointMetadata,
    load_checkpoint,
    model_from_config,
    update_metadata,
    write_atomically,
)
from molflt.config import Config
from molflt.domain import measure_domain
from molflt.errors import InputError
from molflt.run_folder import check_run_folder, prepare_run_folder
from molflt.training.data import check_labels, fit_references, measure_statistics, warn_of_total_energies
from molflt.training.loaders import build_loader, prepared_samples
from molflt.training.memory import OutOfMemoryReport
from molflt.training.metrics_csv import MetricsCsv
from molflt.training.module import RelaxedEnergyTraining, metric_names
from molflt.training.precision import lightning_precision
from molflt.training.progress import TrainingProgress


@dataclass(frozen=True)
class TrainingResult:
    """Where a finished run left its files, and how good it was."""

    output: Path
    best_checkpoint: Path
    """Weights of the validation with the lowest energy MAE on the first validation split."""
    last_checkpoint: Path
    """Weights of the last validation, which is after the last epoch."""
    best_energy_mae: float
    """Energy MAE of `best_checkpoint` on the first validation split, eV."""


def train(config: Config, *, overwrite: bool = False, progress: bool = True) -> TrainingResult:
    """Train as configured and leave a run folder at `config.training.output`.

    The folder holds config.yaml (complete), metrics.csv (a row per epoch), tensorboard/, and
    checkpoints/best.ckpt and last.ckpt. Nothing is written before the data have been read and checked; a
    folder with content is refused unless `overwrite`, which replaces the files of a run in it and no others.
    torch's, NumPy's and Python's global random states are as before afterwards. Raises `InputError` for data
    or a configuration that can not be trained on.
    """
    output = Path(config.training.output)
    check_run_folder(output, overwrite)
    accelerator = _accelerator(config)
    precision = lightning_precision(config.training.precision, accelerator)
    with isolate_rng(), quiet_libraries():
        seed_everything(config.seed, workers=True, verbose=False)
        module, train_loader, val_loaders = _prepare(config)
        prepare_run_folder(output, config)
        best, last = _checkpoint_callbacks(config, output)
        memory = OutOfMemoryReport(config.data)
        callbacks = [LastEpochValidation(), *([TrainingProgress()] if progress else []), memory, best, last]
        trainer = _trainer(config, accelerator, precision, output, callbacks)
        with memory.told():
            _fit(trainer, module, train_loader, val_loaders)
        if trainer.is_global_zero:
            paths = {best.best_model_path, last.best_model_path}
            _describe_domain(config, paths, trainer.strategy.root_device)
    assert best.best_model_score is not None
    return TrainingResult(
        output=output,
        best_checkpoint=Path(best.best_model_path),
        last_checkpoint=Path(last.best_model_path),
        best_energy_mae=float(best.best_model_score),
    )


class AtomicCheckpointIO(TorchCheckpointIO):
    """Lightning's checkpoint files, each of which is whole or absent even where a run is killed."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        write_atomically(checkpoint, path)


class LastEpochValidation(Callback):
    """Validates after the last epoch even where it is no multiple of `training.validate_every`."""

    def on_train_epoch_start(self, trainer: Trainer, pl_module: Any) -> None:
        if trainer.current_epoch + 1 == trainer.max_epochs:
            trainer.check_val_every_n_epoch = 1


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """Hold back Lightning's greetings, and two warnings that a user of molflt can do nothing about."""
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.WARNING)
    try:
        with warnings.catch_warnings():
            # Samples are in memory: workers would only copy them.
            warnings.filterwarnings("ignore", ".*does not have many workers", PossibleUserWarning)
            # Lightning's own use of a torch class that torch is about to drop.
            warnings.filterwarnings("ignore", ".*LeafSpec.* is deprecated", FutureWarning)
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _prepare(config: Config) -> tuple[RelaxedEnergyTraining, DataLoader, list[DataLoader]]:
    """The network with the scales of its data, and the loaders, all of it read and checked."""
    data = config.data
    train_set = prepared_samples(config, data.train_split)
    val_sets = [prepared_samples(config, split) for split in data.val_splits]
    references = fit_references(train_set, data.train_split) if data.element_references else None
    statistics = measure_statistics(
        train_set, data.train_split, any(config.optim.delta_pos_weight), references
    )
    warn_of_total_energies(statistics.energy_mean, data.train_split)
    splits = {data.train_split: statistics.num_systems}
    for split, val_set in zip(data.val_splits, val_sets, strict=True):
        splits[split] = check_labels(val_set, split)
    metadata = CheckpointMetadata(
        energy_meaning=data.energy_meaning,
        splits=splits,
        elements=statistics.elements,
        num_atoms_range=statistics.num_atoms_range,
        energy_mean=statistics.energy_mean,
        energy_std=statistics.energy_std,
        delta_pos_std=statistics.delta_pos_std,
    )
    model = model_from_config(config)
    model.element_references = references
    model.energy_mean.fill_(statistics.energy_mean if data.energy_mean is None else data.energy_mean)
    model.energy_std.fill_(data.energy_std or statistics.energy_std)
    model.delta_pos_std.fill_(statistics.delta_pos_std)
    module = RelaxedEnergyTraining(config, model, metadata)
    return (
        module,
        build_loader(train_set, config, training=True),
        [build_loader(val_set, config, training=False) for val_set in val_sets],
    )


def _describe_domain(config: Config, paths: Iterable[str], device: torch.device) -> None:
    """Store in checkpoint files where the training systems lie for their weights."""
    samples = prepared_samples(config, config.data.train_split)
    for path in paths:
        domain = measure_domain(load_checkpoint(path).model.to(device), samples, config.data.batch_size)
        update_metadata(path, domain=domain.to_dict())


def _checkpoint_callbacks(config: Config, output: Path) -> tuple[ModelCheckpoint, ModelCheckpoint]:
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


def _accelerator(config: Config) -> str:
    accelerator = config.training.accelerator
    if accelerator == "auto":
        return "gpu" if torch.cuda.is_available() else "cpu"
    if accelerator == "gpu" and not torch.cuda.is_available():
        raise InputError("training.accelerator is gpu, but torch finds no CUDA GPU; use auto or cpu")
    return accelerator


def _trainer(
    config: Config, accelerator: str, precision: Any, output: Path, callbacks: list[Callback]
) -> Trainer:
    clip = config.optim.grad_clip
    return Trainer(
        accelerator=accelerator,
        devices=1,
        max_epochs=config.training.epochs,
        check_val_every_n_epoch=config.training.validate_every,
        precision=precision,
        gradient_clip_val=clip if clip < math.inf else None,
        logger=[
            MetricsCsv(output / "metrics.csv", metric_names(config)),
            TensorBoardLogger(output, name="tensorboard", version="", default_hp_metric=False),
        ],
        callbacks=callbacks,
        plugins=[AtomicCheckpointIO()],
        log_every_n_steps=1,
        num_sanity_val_steps=0,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def _fit(
    trainer: Trainer, module: RelaxedEnergyTraining, train_loader: DataLoader, val_loaders: list[DataLoader]
) -> None:
    handler = signal.getsignal(signal.SIGINT)
    try:
        trainer.fit(module, train_loader, val_loaders)
    except SystemExit:
        # Lightning turns an interrupt into an exit with status 1, and ignores further ones from then on.
        if not trainer.interrupted:
            raise
    finally:
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
            signal.signal(signal.SIGINT, handler)
    if trainer.interrupted:
        raise KeyboardInterrupt
