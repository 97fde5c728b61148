"""metrics.csv of a run folder: a row per epoch, each on disk as soon as it is known."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only

from molflt.config import Config
from molflt.errors import InputError
from molflt.run_folder import write_text


def metric_names(config: Config) -> list[str]:
    """Names of what a run logs per epoch, in order; validation metrics only where the epoch is validated."""
    names = ["epoch", "lr", "seconds", "train/loss", "train/energy_mae"]
    if any(config.optim.delta_pos_weight):
        names.append("train/delta_pos_mae")
    return names + [f"{split}/{name}" for split in config.data.val_splits for name in ("energy_mae", "ewt")]


class MetricsCsv(Logger):
    """Appends what is logged to a CSV file with the columns `step` and those given; absent values stay empty.

    Lightning's own CSV logger rewrites the whole file for each row and clears a folder that it finds in use.
    """

    def __init__(self, path: Path, columns: Sequence[str]) -> None:
        super().__init__()
        self.path = path
        self.columns = ["step", *columns]

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def version(self) -> str:
        return ""

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Nothing: config.yaml has them."""

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Append a row; ValueError for a metric without a column, `InputError` where it cannot be written."""
        new = not self.path.exists()
        try:
            with self.path.open("a", encoding="utf-8", newline="") as file:
                writer = csv.DictWriter(file, self.columns, lineterminator="\n")
                if new:
                    writer.writeheader()
                writer.writerow({"step": step, **metrics})
        except OSError as error:
            raise InputError(
                f"cannot write {self.path}: {error.strerror}; make room there (the run then goes on with "
                "--resume)"
            ) from error


def keep_rows(path: Path, count: int) -> None:
    """Cut a file that `MetricsCsv` wrote after `count` rows, those of the epochs that a run goes on after."""
    if not path.exists():
        return
    try:
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    except (OSError, UnicodeError) as error:
        raise InputError(f"cannot read {path}: {error}; remove it and its rows start anew") from error
    write_text(path, "".join(lines[: count + 1]))
