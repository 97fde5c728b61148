"""A training run from a configuration to a run folder."""

from __future__ import annotations

import json
import math
import signal
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.utilities.seed import isolate_rng
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader

from molflt.checkpoint import CheckpointMetadata, load_checkpoint, model_from_config, update_metadata
from molflt.config import Config, save_config
from molflt.data.batching import SystemBatchSampler
from molflt.domain import measure_domain
from molflt.errors import InputError
from molflt.run_folder import (
    check_run_folder,
    has_resume_state,
    is_first_process,
    prepare_run_folder,
    write_text,
)
from molflt.run_lock import RunLock
from molflt.training.curves import write_curves
from molflt.training.data import DataFit, fit_data, warn_of_total_energies
from molflt.training.loaders import build_loader, prepared_samples
from molflt.training.memory import OutOfMemoryReport
from molflt.training.metrics_csv import keep_rows
from molflt.training.module import RelaxedEnergyTraining
from molflt.training.precision import lightning_precision
from molflt.training.progress import TrainingProgress
from molflt.training.provenance import data_fingerprints, provenance
from molflt.training.resume import (
    ResumePoint,
    ResumeWriter,
    check_continues,
    find_resume_point,
    leave_only,
)
from molflt.training.trainer import (
    LastEpochValidation,
    check_launch,
    check_loggers,
    checkpoint_callbacks,
    launched,
    make_loggers,
    make_trainer,
    quiet_libraries,
    resolve_accelerator,
)
from molflt.training.transfer import initialize_from


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
    last_energy_mae: float
    """That of `last_checkpoint`."""
    averaged: bool
    """Whether the weights that were validated and saved are averages (EMA) of the trained ones."""
    skipped: list[str]
    """What was not finite in each step that was left out."""


def train(
    config: Config, *, overwrite: bool = False, resume: bool = False, progress: bool = True
) -> TrainingResult:
    """Train as configured and leave a run folder at `config.training.output`.

    The folder holds config.yaml (complete), versions.json, metrics.csv (a row per epoch), loss.png,
    tensorboard/, and in checkpoints/ best.ckpt, last.ckpt and the state to continue from. Nothing is written
    before the data have been read and checked; a folder with content is refused unless `overwrite`, which
    replaces the files of a run in it and no others, or `resume`, which continues the run in it with the same
    settings (but for `molflt.training.resume.FREE_SETTINGS`) and ends with the weights that it would have
    had; where there is nothing to continue it starts. torch's, NumPy's and Python's global random states are
    as before afterwards. Raises `InputError` for data or a configuration that can not be trained on, and
    where energies are not finite in the end.
    """
    output = Path(config.training.output)
    accelerator = resolve_accelerator(config)
    precision = lightning_precision(config.training.precision, accelerator)
    check_loggers(config)
    check_launch(config)
    is_first = is_first_process()
    with isolate_rng(), quiet_libraries(), RunLock(output) as lock:
        if is_first:
            check_run_folder(output, overwrite, resume)
            if output.is_dir():
                lock.acquire()
        data = data_fingerprints(config.data)
        point = find_resume_point(output) if resume else None
        if point is not None:
            check_continues(point, config, data, math.prod(launched(config)))
        seed_everything(config.seed, workers=True, verbose=False)
        module, train_set, val_sets, fit = prepare_training(
            config, point.fit if point else None, progress and is_first
        )
        if config.training.init_from is not None and not (point and point.step):
            _take_over(config, module, tell=progress and is_first)
        best, last = checkpoint_callbacks(config, output)
        writer = ResumeWriter(output / "checkpoints", config.training.checkpoint_every, data, fit)
        shown = [TrainingProgress()] if progress else []
        memory = OutOfMemoryReport(config.data)
        loggers = make_loggers(config, output, point.step if point else 0)
        callbacks = [LastEpochValidation(), *shown, memory, best, last, writer]
        trainer = make_trainer(config, accelerator, precision, loggers, callbacks)
        place = trainer.world_size, trainer.global_rank
        train_loader = build_loader(train_set, config, True, *place)
        if config.training.strategy == "fsdp":
            place = 1, 0
        val_loaders = [build_loader(val_set, config, False, *place) for val_set in val_sets]
        if point is not None:
            _go_to(train_loader, point)

        def open_output() -> None:
            lock.acquire()
            if point is None:
                # Another run may have begun, and even ended, since.
                check_run_folder(output, overwrite, resume and not has_resume_state(output))
            _open_run_folder(output, config, data, point)

        module.open_output = open_output
        with memory.told():
            _fit(trainer, module, train_loader, val_loaders, point)
        _check_finite(config, module.val_metrics)
        if trainer.is_global_zero:
            paths = {best.best_model_path, last.best_model_path}
            batch_size = _sampler(train_loader).safe_batch_size
            _describe_domain(train_set, batch_size, paths, trainer.strategy.root_device)
            _draw(output)
    assert best.best_model_score is not None
    return TrainingResult(
        output=output,
        best_checkpoint=output / "checkpoints" / Path(best.best_model_path).name,
        last_checkpoint=output / "checkpoints" / Path(last.best_model_path).name,
        best_energy_mae=float(best.best_model_score),
        last_energy_mae=module.val_metrics[f"{config.data.val_splits[0]}/energy_mae"],
        averaged=config.optim.ema_decay > 0,
        skipped=module.skipped,
    )


def _open_run_folder(output: Path, config: Config, data: dict[str, str], point: ResumePoint | None) -> None:
    """Make the folder for a new run, or bring it back to where the run goes on."""
    if point is None:
        prepare_run_folder(output, config)
    else:
        if point.note:
            print(f"molflt: {point.note}", file=sys.stderr)
        keep_rows(output / "metrics.csv", point.epoch)
        try:
            leave_only(point)
            save_config(config, output / "config.yaml")
        except OSError as error:
            raise InputError(
                f"cannot write the run folder {output}: {error.strerror}; make room there"
            ) from error
    write_text(output / "versions.json", json.dumps(provenance(data), indent=1) + "\n")


def _check_finite(config: Config, metrics: Mapping[str, float]) -> None:
    """The last step may have led where no later one finds that it did."""
    for split in config.data.val_splits:
        mae = metrics[f"{split}/energy_mae"]
        if not math.isfinite(mae):
            raise InputError(
                f"the energy MAE on {split} is {mae} after the last step: the weights have run away; lower "
                "optim.lr and start anew with --overwrite"
            )


def _draw(output: Path) -> None:
    """Draw the curves; a run has not failed where that does."""
    try:
        write_curves(output)
    except (OSError, ValueError, KeyError) as error:
        print(f"molflt: cannot draw {output / 'loss.png'}: {error}; the run is complete", file=sys.stderr)


def _sampler(loader: DataLoader) -> SystemBatchSampler:
    sampler = loader.batch_sampler
    assert isinstance(sampler, SystemBatchSampler)
    return sampler


def _go_to(loader: DataLoader, point: ResumePoint) -> None:
    sampler = _sampler(loader)
    sampler.set_epoch(point.epoch)
    sampler.start_batch = point.batch


def prepare_training(
    config: Config, fit: DataFit | None = None, progress: bool = False
) -> tuple[RelaxedEnergyTraining, Sequence[Data], list[Sequence[Data]], DataFit]:
    """The network with the scales of its data, the splits, all of it read and checked, and the scales.

    Args:
        config: of the run.
        fit: the scales where they are known, of these very data.
        progress: say on stderr how far reading has come, and what the scales are taken from.
    """
    data = config.data
    train_set = prepared_samples(config, data.train_split, progress)
    val_sets = [prepared_samples(config, split, progress) for split in data.val_splits]
    fit = fit or fit_data(config, train_set, progress)
    statistics = fit.train
    warn_of_total_energies(statistics.energy_mean, data.train_split)
    if progress:
        print(f"molflt: statistics of the data: {fit.source}", file=sys.stderr)
    metadata = CheckpointMetadata(
        energy_meaning=data.energy_meaning,
        splits=fit.splits,
        elements=statistics.elements,
        num_atoms_range=statistics.num_atoms_range,
        energy_mean=statistics.energy_mean,
        energy_std=statistics.energy_std,
        delta_pos_std=statistics.delta_pos_std,
    )
    model = model_from_config(config)
    model.element_references = fit.references
    model.energy_mean.fill_(statistics.energy_mean if data.energy_mean is None else data.energy_mean)
    model.energy_std.fill_(data.energy_std or statistics.energy_std)
    model.delta_pos_std.fill_(statistics.delta_pos_std)
    return RelaxedEnergyTraining(config, model, metadata), train_set, val_sets, fit


def _take_over(config: Config, module: RelaxedEnergyTraining, tell: bool) -> None:
    """Start from the weights of another training, and say which those are."""
    source = config.training.init_from
    assert source is not None
    transfer = initialize_from(module.model, config, source, config.training.init_skip)
    if tell:
        for line in transfer.lines():
            print(f"molflt: {source}: {line}", file=sys.stderr)


def _describe_domain(
    samples: Sequence[Data], batch_size: int, paths: Iterable[str], device: torch.device
) -> None:
    """Store in checkpoint files where the training systems lie for their weights."""
    for path in paths:
        domain = measure_domain(load_checkpoint(path).model.to(device), samples, batch_size)
        update_metadata(path, domain=domain.to_dict())


def _fit(
    trainer: Trainer,
    module: RelaxedEnergyTraining,
    train_loader: DataLoader,
    val_loaders: list[DataLoader],
    point: ResumePoint | None,
) -> None:
    resumed = point.path if point is not None and point.step else None
    handler = signal.getsignal(signal.SIGINT)
    try:
        trainer.fit(module, train_loader, val_loaders, ckpt_path=resumed)
    except SystemExit:
        # Lightning turns an interrupt into an exit with status 1, and ignores further ones from then on.
        if not trainer.interrupted:
            raise
    finally:
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
            signal.signal(signal.SIGINT, handler)
    if trainer.interrupted:
        raise KeyboardInterrupt
