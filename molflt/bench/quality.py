"""`molflt bench quality`: trains each variant and seed on equal data, steps and size, and keeps the scores.

Below `OUTPUT/PLAN`:

    runs.csv                            a row per run and split, see `quality_results.RunRow`
    configs/DATASET-VARIANT.yaml        the complete configuration, of the first seed
    curves/DATASET-VARIANT-SEED.csv     metrics.csv of the run

Nothing is selected: the score is that of the last epoch. What is in runs.csv with the same settings is not
run again, so an interrupted plan goes on where it was.
"""

from __future__ import annotations

import csv
import hashlib
import json
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
import yaml
from torch import Tensor
from torch_geometric.data import Data

from molflt.bench.quality_plans import PLANS, VARIANTS, Plan
from molflt.bench.quality_results import RUNS, RunRow, quality_table, read_rows, write_rows
from molflt.checkpoint import model_from_config
from molflt.config import Config, config_to_dict, flat_settings
from molflt.data.datasets import OC20IS2RE
from molflt.errors import InputError

if TYPE_CHECKING:
    from rich.table import Table

Train = Callable[[Config], Path]
"""Trains as configured and returns the run folder, with metrics.csv and checkpoints."""


@dataclass(frozen=True)
class QualityBench:
    """A plan, and which part of it to run.

    Args:
        plan: key of `PLANS`.
        seeds: of initial weights, frequencies and order of batches.
        variants: keys of `VARIANTS`; all of the plan's by default.
        output: folder of the results of all plans.

    Raises:
        InputError: no such plan or variant, or no or repeated seeds.
    """

    plan: str
    seeds: tuple[int, ...] = (0, 1, 2)
    variants: tuple[str, ...] = ()
    output: Path = Path("benchmarks/quality")

    def __post_init__(self) -> None:
        if self.plan not in PLANS:
            raise InputError(f"there is no plan {self.plan!r}; take one of {', '.join(PLANS)}")
        for variant in self.variants:
            if variant not in VARIANTS:
                raise InputError(f"there is no variant {variant!r}; take some of {', '.join(VARIANTS)}")
        if not self.seeds or len(set(self.seeds)) < len(self.seeds) or min(self.seeds) < 0:
            raise InputError(f"seeds must be different numbers of at least 0, got {list(self.seeds)}")

    @property
    def folder(self) -> Path:
        """Where the results are."""
        return self.output / self.plan

    def rows(self) -> list[RunRow]:
        """The kept results."""
        return read_rows(self.folder / RUNS)

    def table(self) -> Table:
        """The table of the kept results.

        Raises:
            InputError: there are none.
        """
        rows = self.rows()
        if not rows:
            raise InputError(f"there are no results in {self.folder}; run the plan without --table first")
        labels = {key: variant.label for key, variant in VARIANTS.items()}
        return quality_table(rows, labels, f"{self.plan}: {PLANS[self.plan].text}")

    def run(self, train: Train, progress: Callable[[str], None] = lambda _: None) -> None:
        """Train what is not there yet, seed by seed, and keep each run's results as soon as they are known.

        Args:
            train: trains one configuration.
            progress: receives a line of text after each run.
        """
        plan = PLANS[self.plan]
        variants = self.variants or plan.variants
        todo = [
            (dataset, variant, seed)
            for seed in self.seeds
            for dataset in plan.configs
            for variant in variants
        ]
        for number, (dataset, variant, seed) in enumerate(todo, start=1):
            config = plan.config(dataset, variant, seed)
            settings = fingerprint(config)
            rows = self.rows()
            if any(row.run == (dataset, variant, seed) and row.settings == settings for row in rows):
                continue
            found = run_one(config, dataset, variant, train, self.folder)
            # Runs of other settings would be averaged with these.
            stale = {
                row.run for row in rows if row.run[:2] == (dataset, variant) and row.settings != settings
            }
            kept = [row for row in rows if row.run not in stale]
            write_rows(self.folder / RUNS, sorted([*kept, *found], key=_order(plan)))
            scores = ", ".join(f"{row.split} {row.energy_mae:.4f} eV" for row in found)
            seconds = found[0].cpu_seconds
            progress(
                f"{number}/{len(todo)} {dataset} {variant} seed {seed}: {scores} ({seconds:.0f} s of CPU)"
            )


def run_one(config: Config, dataset: str, variant: str, train: Train, folder: Path) -> list[RunRow]:
    """Train one configuration, keep its curve and configuration in `folder`, and give a row per split."""
    config = deepcopy(config)
    start = time.process_time()
    with tempfile.TemporaryDirectory(prefix="molflt-quality-") as scratch:
        config.training.output = str(Path(scratch) / "run")
        run_folder = train(config)
        seconds = time.process_time() - start
        curve = folder / "curves" / f"{dataset}-{variant}-{config.seed}.csv"
        curve.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(run_folder / "metrics.csv", curve)
    last = last_row(curve)
    config.training.output = f"runs/quality-{dataset}-{variant}"
    _keep_config(config, folder / "configs" / f"{dataset}-{variant}.yaml")
    targets = {split: _targets(config, split) for split in (config.data.train_split, *config.data.val_splits)}
    median = targets[config.data.train_split].median()
    return [
        RunRow(
            dataset=dataset,
            variant=variant,
            seed=config.seed,
            split=split,
            energy_mae=float(last[f"{split}/energy_mae"]),
            energy_std=targets[split].std(correction=0).item(),
            median_mae=(targets[split] - median).abs().mean().item(),
            parameters=sum(p.numel() for p in model_from_config(config).parameters()),
            epochs=config.training.epochs,
            steps=int(last["step"]),
            cpu_seconds=seconds,
            torch=torch.__version__,
            settings=fingerprint(config),
        )
        for split in config.data.val_splits
    ]


def last_row(path: Path) -> dict[str, str]:
    """The last row of a metrics.csv."""
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))[-1]


def fingerprint(config: Config) -> str:
    """Hash of the settings that are not as `Config()` has them, seed and run folder left out.

    So a setting that a later version adds does not make the runs of an earlier one other runs.
    """
    values, defaults = flat_settings(config), flat_settings(Config())
    changed = {key: value for key, value in values.items() if value != defaults[key]}
    for key in ("seed", "training.output"):
        changed.pop(key, None)
    return hashlib.sha256(json.dumps(changed, sort_keys=True).encode()).hexdigest()[:12]


def _keep_config(config: Config, path: Path) -> None:
    values = config_to_dict(config)
    values["seed"] = 0
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(values, sort_keys=False, allow_unicode=True), encoding="utf-8")


def _targets(config: Config, split: str) -> Tensor:
    samples = cast("Iterable[Data]", OC20IS2RE(config.data.root, split))
    return torch.tensor([float(sample.y_relaxed) for sample in samples], dtype=torch.float64)


def _order(plan: Plan) -> Callable[[RunRow], tuple[int, int, int]]:
    datasets, variants = list(plan.configs), list(VARIANTS)
    return lambda row: (datasets.index(row.dataset), variants.index(row.variant), row.seed)
