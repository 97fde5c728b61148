"""Where a run can be continued: what is saved for it, how it is found again, and what may differ.

`checkpoints/resume.ckpt` is a Lightning checkpoint with everything that the steps to come depend on: weights,
their average, optimiser, schedule, position in the epoch, sums of the epoch's metrics, the best value so far;
and what was taken from the data, so that they are not read for it again. Random states are not among it, as
each step seeds its own (`molflt.training.seeds`). It is written before the first step, after each epoch and
every `training.checkpoint_every` steps; the one before stays as `resume-previous.ckpt`. Both hold plain
values and tensors only and are read with `weights_only=True`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.strategies import ModelParallelStrategy

from molflt.archive import read_archive
from molflt.config import Config, config_from_dict, config_to_dict, flat_settings
from molflt.errors import InputError
from molflt.run_folder import RESUME_NEWEST, RESUME_PREVIOUS
from molflt.training.data import DataFit, data_fit_from_state
from molflt.training.module import RelaxedEnergyTraining
from molflt.training.nonfinite import gather

SECTION = "molflt_resume"
VERSION = 1
FREE_SETTINGS = frozenset(
    {
        "data.root",
        "data.num_workers",
        "training.output",
        "training.accelerator",
        "training.cache_gib",
        "training.checkpoint_every",
        "training.on_nonfinite",
        "training.tensorboard",
        "training.wandb",
    }
)
"""What does not change the weights that come out, `training.on_nonfinite` where no step is left out; the data
at `data.root` are compared by content."""


@dataclass(frozen=True)
class ResumePoint:
    """A state that a run can be continued from."""

    path: Path
    """The file that holds it."""
    epoch: int
    """Whole epochs trained."""
    batch: int
    """Batches trained of the epoch after them."""
    step: int
    """Steps trained."""
    config: Config
    """Configuration of the run."""
    data: dict[str, str]
    """Fingerprint of each split."""
    processes: int
    """That shared the work."""
    fit: DataFit | None
    """What the run has taken from its data; None in the states of earlier versions."""
    note: str = ""
    """What is to be said about it: a damaged newer file."""


class ResumeWriter(Checkpoint):
    """Saves the states to continue from, and takes one up.

    Args:
        folder: the run's `checkpoints`.
        every: steps between states within an epoch; 0 saves them between epochs only.
        data: fingerprint of each split.
        fit: what the run takes from them.
    """

    def __init__(self, folder: Path, every: int, data: Mapping[str, str], fit: DataFit) -> None:
        super().__init__()
        self.folder = folder
        self.every = every
        self.data = dict(data)
        self.fit = fit
        self._position = (0, 0)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        steps = gather(trainer.global_step)
        if len(set(steps)) > 1:
            raise InputError(
                f"the processes find different states of the run in {self.folder} (steps {steps}); "
                "put the run folder where all nodes see the same files"
            )
        # torch fills the state of an optimiser that has not stepped by a step of its own where it is sharded.
        if trainer.global_step == 0 and not isinstance(trainer.strategy, ModelParallelStrategy):
            self._save(trainer, 0, 0)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self.every and batch_idx and batch_idx % self.every == 0:
            self._save(trainer, trainer.current_epoch, batch_idx)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Lightning runs this after the module's, as for any `Checkpoint`: the epoch's row is written.
        self._save(trainer, trainer.current_epoch + 1, 0)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero:
            (self.folder / RESUME_PREVIOUS).unlink(missing_ok=True)

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        assert isinstance(pl_module, RelaxedEnergyTraining)
        epoch, batch = self._position
        checkpoint["loops"]["fit_loop"] = settled(checkpoint["loops"]["fit_loop"], epoch, batch)
        checkpoint[SECTION] = {
            "version": VERSION,
            "config": config_to_dict(pl_module.config),
            "data": self.data,
            "fit": self.fit.state(),
            "epoch": epoch,
            "batch": batch,
            "step": trainer.global_step,
            "processes": trainer.world_size,
            "training": pl_module.training_state(),
        }

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        assert isinstance(pl_module, RelaxedEnergyTraining)
        pl_module.load_training_state(checkpoint[SECTION]["training"])
        for state in checkpoint["callbacks"].values():
            relocate(state, self.folder)

    def _save(self, trainer: Trainer, epoch: int, batch: int) -> None:
        self._position = (epoch, batch)
        newest = self.folder / RESUME_NEWEST
        growing = newest.with_name(f".{newest.name}.partial")
        trainer.save_checkpoint(growing, weights_only=False)
        if trainer.is_global_zero:
            try:
                if newest.exists():
                    newest.replace(self.folder / RESUME_PREVIOUS)
                growing.replace(newest)
            except OSError as error:
                raise InputError(
                    f"cannot write {newest}: {error.strerror}; see that the folder stays in place while a "
                    "run is writing it"
                ) from error
        # No process goes on, or ends, before the state that all would take up is in its place.
        trainer.strategy.barrier("resume state")


def settled(fit_loop: Mapping[str, Any], epoch: int, batch: int) -> dict[str, Any]:
    """The state of Lightning's fit loop with its counters between two batches.

    They are saved from within hooks, where some of a step's or an epoch's counters have moved and others not.
    """
    counters = ("ready", "completed", "started", "processed")
    begun = epoch + (batch > 0)
    epochs = {"ready": begun, "started": begun, "processed": epoch, "completed": epoch}
    total = fit_loop["epoch_loop.batch_progress"]["total"]["completed"]
    return {
        **fit_loop,
        "epoch_progress": {"total": dict(epochs), "current": dict(epochs)},
        "epoch_loop.batch_progress": {
            "total": dict.fromkeys(counters, total),
            "current": dict.fromkeys(counters, batch),
            "is_last_batch": False,
        },
    }


def relocate(state: dict[str, Any], folder: Path) -> None:
    """Have the state of a callback that writes checkpoints speak of `folder`, wherever it was saved."""
    folder = folder.resolve()
    for name, value in state.items():
        if name == "dirpath":
            state[name] = str(folder)
        elif name.endswith("_path") and value:
            state[name] = str(folder / Path(value).name)
        elif name == "best_k_models":
            state[name] = {str(folder / Path(path).name): score for path, score in value.items()}


def find_resume_point(output: Path) -> ResumePoint | None:
    """The newest whole state in a run folder; None where there is none.

    Raises `InputError` where there are only damaged ones.
    """
    problems: list[str] = []
    for name in (RESUME_NEWEST, RESUME_PREVIOUS):
        path = output / "checkpoints" / name
        if not path.exists():
            continue
        try:
            point = _read(path)
        except InputError as error:
            problems.append(str(error))
        else:
            note = f"{problems[0]}; continuing from {path.name}, step {point.step}" if problems else ""
            return ResumePoint(**{**vars(point), "note": note})
    if problems:
        raise InputError(
            f"no state of this run can be read ({'; '.join(problems)}); start it anew with --overwrite"
        )
    return None


def _read(path: Path) -> ResumePoint:
    section = read_archive(path).get(SECTION)
    if not isinstance(section, Mapping) or section.get("version") != VERSION:
        raise InputError(f"{path} is no state of a run that this version of molflt can continue")
    return ResumePoint(
        path=path,
        epoch=section["epoch"],
        batch=section["batch"],
        step=section["step"],
        config=config_from_dict(section["config"], source=f"{path} (its configuration)"),
        data=dict(section["data"]),
        processes=section["processes"],
        fit=data_fit_from_state(section["fit"]) if "fit" in section else None,
    )


def leave_only(point: ResumePoint) -> None:
    """Remove what a killed run left beside the state it is taken up from: damaged and half-written files."""
    folder = point.path.parent
    for partial in folder.glob(".*.partial"):
        partial.unlink()
    if point.path.name != RESUME_NEWEST:
        # It would become the previous one at the next save, in the place of a good one.
        (folder / RESUME_NEWEST).unlink(missing_ok=True)


def check_continues(point: ResumePoint, config: Config, data: Mapping[str, str], processes: int) -> None:
    """Raise `InputError` naming each setting and split with which the run would not go on as it began."""
    if processes != point.processes:
        raise InputError(
            f"cannot continue {config.training.output} with {processes} processes: it was begun with "
            f"{point.processes}, a batch each; start as many"
        )
    old, new = flat_settings(point.config), flat_settings(config)
    changed = [
        f"{key} was {old[key]!r} and is {new[key]!r}"
        for key in new
        if key not in FREE_SETTINGS and old[key] != new[key]
    ]
    if changed:
        raise InputError(
            f"cannot continue {config.training.output} with other settings: {'; '.join(changed)}; "
            "set them back or start a new run in another folder"
        )
    differing = [split for split in data if point.data.get(split) != data[split]]
    if differing:
        raise InputError(
            f"cannot continue {config.training.output}: the data of {', '.join(differing)} at "
            f"{config.data.root} are not those it began with; start a new run in another folder"
        )
