"""Results of `molflt bench quality`: a CSV with a row per run and split, and the table made from it."""

from __future__ import annotations

import csv
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

from molflt.errors import InputError

if TYPE_CHECKING:
    from rich.table import Table

RUNS = "runs.csv"


@dataclass(frozen=True)
class RunRow:
    """One split's score of one run, after its last epoch.

    Attributes:
        dataset, variant, seed, split: which run, and which systems.
        energy_mae: eV, of the averaged weights that a checkpoint holds.
        energy_std: standard deviation of the split's labels, eV.
        median_mae: MAE of the training labels' median, eV: what knowing nothing of a system gives.
        parameters: of the network.
        epochs, steps: of training.
        cpu_seconds: that the process spent on the run.
        torch: version.
        settings: fingerprint of the configuration but for seed and place; a run of others is not the same.
    """

    dataset: str
    variant: str
    seed: int
    split: str
    energy_mae: float
    energy_std: float
    median_mae: float
    parameters: int
    epochs: int
    steps: int
    cpu_seconds: float
    torch: str
    settings: str

    @property
    def run(self) -> tuple[str, str, int]:
        """Data set, variant and seed."""
        return self.dataset, self.variant, self.seed


def read_rows(path: Path) -> list[RunRow]:
    """The rows of a runs.csv; none where there is no such file.

    Raises:
        InputError: it is not one.
    """
    if not path.is_file():
        return []
    types = {
        field.name: {"int": int, "float": float, "str": str}[str(field.type)] for field in fields(RunRow)
    }
    try:
        with path.open(encoding="utf-8", newline="") as file:
            return [
                RunRow(**{name: parse(row[name]) for name, parse in types.items()})
                for row in csv.DictReader(file)
            ]
    except (OSError, UnicodeDecodeError, KeyError, TypeError, ValueError, csv.Error) as error:
        raise InputError(f"{path} is no table of runs ({error}); mend it or move it away") from None


def write_rows(path: Path, rows: Iterable[RunRow]) -> None:
    """Write a runs.csv, ordered by data set, variant, seed and split as first met; it appears whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(RunRow)], lineterminator="\n")
        writer.writeheader()
        for row in rows:
            writer.writerow(
                asdict(row) | {name: f"{getattr(row, name):.6f}" for name in _ENERGIES} | _seconds(row)
            )
    partial.replace(path)


def quality_table(rows: Sequence[RunRow], labels: dict[str, str], title: str) -> Table:
    """Mean and standard deviation of the MAE over seeds, a row per variant and a column per split.

    Args:
        rows: of one plan.
        labels: variant to what it is called, in the order of the table.
        title: of the table.
    """
    from rich.table import Table

    splits = list(dict.fromkeys((row.dataset, row.split) for row in rows))
    table = Table(
        title=title, caption="energy MAE after the last epoch: mean ± standard deviation over seeds"
    )
    table.add_column("attention")
    for dataset, split in splits:
        table.add_column(f"{dataset}, {split} (eV)", justify="right")
    for heading in ("seeds", "parameters", "CPU s a run"):
        table.add_column(heading, justify="right")
    order = [*labels, *dict.fromkeys(row.variant for row in rows if row.variant not in labels)]
    for variant in order:
        ours = [row for row in rows if row.variant == variant]
        if not ours:
            continue
        cells = [
            mean_and_std([row.energy_mae for row in ours if (row.dataset, row.split) == split])
            for split in splits
        ]
        runs = {row.run: row for row in ours}.values()
        seeds = len({row.seed for row in ours})
        seconds = statistics.mean(row.cpu_seconds for row in runs)
        counts = sorted({row.parameters for row in runs})
        table.add_row(
            labels.get(variant, variant),
            *cells,
            str(seeds),
            " / ".join(f"{n:,}" for n in counts),
            f"{seconds:.0f}",
        )
    table.add_section()
    for name, label in (("median_mae", "median of the training labels"), ("energy_std", "std of the labels")):
        values = {(row.dataset, row.split): getattr(row, name) for row in rows}
        table.add_row(label, *(f"{values[split]:.4f}" for split in splits), "", "", "")
    return table


def mean_and_std(values: Sequence[float]) -> str:
    """`0.1234 ± 0.0056`, the sample's standard deviation; the mean alone of a single value."""
    if not values:
        return ""
    mean = f"{statistics.mean(values):.4f}"
    return mean if len(values) == 1 else f"{mean} ± {statistics.stdev(values):.4f}"


_ENERGIES = ("energy_mae", "energy_std", "median_mae")


def _seconds(row: RunRow) -> dict[str, str]:
    return {"cpu_seconds": f"{row.cpu_seconds:.1f}"}
