"""loss.png of a run folder: how loss, errors and learning rate went over the epochs."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator


def read_metrics(path: Path) -> dict[str, list[float]]:
    """Columns of a metrics.csv; NaN where a value is absent."""
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    return {name: [float(row[name] or math.nan) for row in rows] for name in (rows[0] if rows else ())}


def draw_curves(metrics: Mapping[str, Sequence[float]]) -> Figure:
    """Loss and learning rate on the left, energy MAE per split on the right, over the epochs.

    Args:
        metrics: columns `epoch`, `lr`, `train/loss` and `<split>/energy_mae` (eV), with NaN for epochs that
            were not validated.
    """
    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    epochs = metrics["epoch"]
    marker = "." if len(epochs) < 50 else ""
    left.plot(epochs, metrics["train/loss"], color="C0", marker=marker, label="training loss")
    left.set(xlabel="epoch", ylabel="loss", yscale="log", title="loss and learning rate")
    rate = left.twinx()
    rate.plot(epochs, metrics["lr"], color="0.6", linestyle="--", label="learning rate after the epoch")
    rate.set(ylabel="learning rate", ylim=(0, None))
    lines = [*left.get_lines(), *rate.get_lines()]
    left.legend(lines, [str(line.get_label()) for line in lines], loc="upper right", fontsize="small")
    for name, values in metrics.items():
        split, _, quantity = name.partition("/")
        if quantity == "energy_mae":
            known = [(x, y) for x, y in zip(epochs, values, strict=True) if math.isfinite(y)]
            right.plot(*zip(*known, strict=True), marker=marker, label=split)
    right.set(xlabel="epoch", ylabel="energy MAE (eV)", yscale="log", title="energy error")
    right.legend(fontsize="small")
    right.grid(alpha=0.3, which="both")
    for axes in (left, right):
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    return figure


def write_curves(output: Path) -> None:
    """Draw metrics.csv of a run folder to its loss.png."""
    draw_curves(read_metrics(output / "metrics.csv")).savefig(output / "loss.png", dpi=120)
