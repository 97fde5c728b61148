"""The same training from several seeds, and the mean and spread of how good the results are."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from molflt.config import Config
from molflt.errors import InputError
from molflt.run_folder import check_run_folder, is_first_process
from molflt.training.run import TrainingResult, train


@dataclass(frozen=True)
class SeedSummary:
    """Mean and sample standard deviation of energy MAEs over seeds, eV; the latter is NaN for one seed."""

    best_mean: float
    best_std: float
    last_mean: float
    last_std: float


def seed_config(config: Config, seed: int) -> Config:
    """The configuration with another seed, in the folder `seed-<seed>` of its run folder."""
    output = str(Path(config.training.output) / f"seed-{seed}")
    return replace(config, seed=seed, training=replace(config.training, output=output))


def train_seeds(
    config: Config,
    seeds: Sequence[int],
    *,
    overwrite: bool = False,
    resume: bool = False,
    progress: bool = True,
) -> dict[int, TrainingResult]:
    """Train with one seed after the other, each as `train` does, and return the results by seed.

    Raises `InputError` before the first where a run folder is in use, or the seeds' own folder holds a run,
    and as `train`.
    """
    configs = {seed: seed_config(config, seed) for seed in seeds}
    if (Path(config.training.output) / "config.yaml").exists():
        raise InputError(
            f"{config.training.output} holds a run of its own; choose another --training.output for the seeds"
        )
    for each in configs.values() if is_first_process() else ():
        check_run_folder(Path(each.training.output), overwrite, resume)
    return {
        seed: train(each, overwrite=overwrite, resume=resume, progress=progress)
        for seed, each in configs.items()
    }


def summarize(results: Mapping[int, TrainingResult]) -> SeedSummary:
    """Mean and spread over the seeds."""

    def spread(values: Sequence[float]) -> tuple[float, float]:
        return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else float("nan")

    best = spread([result.best_energy_mae for result in results.values()])
    last = spread([result.last_energy_mae for result in results.values()])
    return SeedSummary(*best, *last)
