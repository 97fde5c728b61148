"""The same training from several seeds, and the mean and spread of how good the results are.

`seeds.json` in the seeds' common folder holds both; it is written anew after each seed.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from molflt.config import Config
from molflt.errors import InputError
from molflt.run_folder import check_run_folder, is_first_process, write_text
from molflt.training.run import TrainingResult, train

RESULTS = "seeds.json"


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

    They are written to `seeds.json`, too. Raises `InputError` before the first where a run folder is in use,
    the seeds' own folder holds a run, or results of other seeds that are not to be replaced; and as `train`.
    """
    configs = {seed: seed_config(config, seed) for seed in seeds}
    output = Path(config.training.output)
    if (output / "config.yaml").exists():
        raise InputError(f"{output} holds a run of its own; choose another --training.output for the seeds")
    if is_first_process():
        for each in configs.values():
            check_run_folder(Path(each.training.output), overwrite, resume)
        if (output / RESULTS).exists() and not (overwrite or resume):
            raise InputError(
                f"{output / RESULTS} holds the results of other seeds; add --resume and name those as well, "
                "or choose another --training.output"
            )
    results: dict[int, TrainingResult] = {}
    for seed, each in configs.items():
        results[seed] = train(each, overwrite=overwrite, resume=resume, progress=progress)
        if is_first_process():
            content = results_content(results, config.data.val_splits[0])
            write_text(output / RESULTS, json.dumps(content, indent=1) + "\n")
    return results


def summarize(results: Mapping[int, TrainingResult]) -> SeedSummary:
    """Mean and spread over the seeds."""

    def spread(values: Sequence[float]) -> tuple[float, float]:
        return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else float("nan")

    best = spread([result.best_energy_mae for result in results.values()])
    last = spread([result.last_energy_mae for result in results.values()])
    return SeedSummary(*best, *last)


def results_content(results: Mapping[int, TrainingResult], split: str) -> dict[str, Any]:
    """What `seeds.json` holds: the summary, null where there is no spread, and a row per seed.

    Args:
        results: by seed.
        split: the validation split that they are on.
    """
    summary = {
        name: value if math.isfinite(value) else None for name, value in asdict(summarize(results)).items()
    }
    rows = [
        {
            "seed": seed,
            "best": result.best_energy_mae,
            "last": result.last_energy_mae,
            "steps_left_out": len(result.skipped),
            "best_checkpoint": str(result.best_checkpoint.relative_to(result.output.parent)),
        }
        for seed, result in results.items()
    ]
    return {"quantity": f"energy MAE on {split}, eV", **summary, "seeds": rows}
