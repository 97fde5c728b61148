"""The tables that the command line prints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.table import Table

if TYPE_CHECKING:
    from molflt.evaluation import SplitScore
    from molflt.prediction import Prediction
    from molflt.training import TrainingResult


def score_tables(scores: Sequence[SplitScore]) -> list[Table]:
    """Scores, a section per method, and a table more for each grouping that they are broken down by."""
    tables: dict[str, list[SplitScore]] = {}
    for row in scores:
        tables.setdefault(row.group.partition("=")[0], []).append(row)
    return [_score_table(rows, grouping) for grouping, rows in tables.items()]


def _score_table(scores: Sequence[SplitScore], grouping: str) -> Table:
    has_intervals = any(row.intervals for row in scores)
    table = Table(caption="in brackets: 95 % bootstrap intervals over systems" if has_intervals else None)
    table.add_column("method", overflow="fold")
    table.add_column("split")
    if grouping:
        table.add_column(grouping)
    ewt = f"EwT {scores[0].threshold:g} eV (%)" if scores[0].threshold != 0.02 else "EwT (%)"
    for heading in ("energy MAE (eV)", ewt, "RMSE (eV)", "MSE (eV²)", "R²", "Spearman", "systems"):
        table.add_column(heading, justify="right")
    before: tuple[str, str] | None = None
    for row in scores:
        section = (row.method, row.split if grouping else "")
        if before is not None and section != before:
            table.add_section()
        before = section
        table.add_row(
            row.method,
            row.split,
            *([row.group.partition("=")[2]] if grouping else []),
            _metric(row, "energy_mae", "{:.4f}"),
            _metric(row, "ewt", "{:.2f}", 100.0),
            *(f"{getattr(row, name):.4f}" for name in ("energy_rmse", "energy_mse", "r2", "spearman")),
            str(row.num_systems),
        )
    return table


def _metric(row: SplitScore, name: str, form: str, scale: float = 1.0) -> str:
    """The value, with its interval or its standard deviation over checkpoints."""
    text = form.format(scale * getattr(row, name))
    if name in row.intervals:
        text += " [" + ", ".join(form.format(scale * bound) for bound in row.intervals[name]) + "]"
    if name in row.stds:
        text += " ± " + form.format(scale * row.stds[name])
    return text


def prediction_table(predictions: Sequence[Prediction], energy_meaning: str, domain: str) -> Table:
    """Predictions, the meaning of the energy and the training data below them."""
    spread = {"ensemble": "the checkpoints", "redraws": "redraws of the random features, no error bar"}
    kinds = dict.fromkeys(spread[row.uncertainty_kind] for row in predictions if row.uncertainty is not None)
    caption = [f"energy: {energy_meaning}", *(f"±: standard deviation over {kind}" for kind in kinds)]
    table = Table(caption="\n".join([*caption, *([f"checkpoint: {domain}"] if domain else [])]))
    table.add_column("structure", overflow="fold")
    table.add_column("frame", justify="right")
    table.add_column("formula")
    table.add_column("atoms", justify="right")
    table.add_column("energy (eV)", justify="right")
    table.add_column("±", justify="right")
    table.add_column("unlike training")
    table.add_column("tags")
    table.add_column("pbc")
    table.add_column("warnings", overflow="fold")
    for row in predictions:
        table.add_row(
            row.source,
            str(row.frame),
            row.formula,
            str(row.n_atoms),
            f"{row.energy:.4f}",
            "" if row.uncertainty is None else f"{row.uncertainty:.4f}",
            "yes" if row.unlike_training else "no",
            row.tag_source,
            row.pbc,
            "; ".join(row.notes),
        )
    return table


def inspection_tables(summary: Mapping[str, Any]) -> list[Table]:
    """What `molflt.data.inspect.inspect_lmdb` found: the fields, then the distributions and elements."""
    fields = Table(title=f"{summary['path']}: {summary['records']} records")
    for heading in ("field", "records", "shape", "stored as", "unit", "meaning"):
        fields.add_column(heading, overflow="fold")
    for name, field in summary["fields"].items():
        fields.add_row(
            name, str(field["records"]), field["shape"], field["dtype"], field["unit"], field["meaning"]
        )
    content = Table()
    for heading in ("quantity", "records", "min", "max", "mean", "std"):
        content.add_column(heading, justify="left" if heading == "quantity" else "right")
    for name, values in summary.items():
        if isinstance(values, Mapping) and "histogram" in values:
            numbers = (f"{values[key]:.4g}" for key in ("min", "max", "mean", "std"))
            content.add_row(name, str(values["n"]), *numbers)
    elements = Table("element", "systems with it")
    for symbol, count in summary["elements"].items():
        elements.add_row(symbol, str(count))
    return [fields, content, elements]


def seed_table(results: Mapping[int, TrainingResult], split: str) -> Table:
    """What each seed gave on a validation split, with mean and standard deviation over the seeds."""
    from molflt.training import summarize

    table = Table(caption=f"energy MAE on {split}; std: sample standard deviation over seeds")
    table.add_column("seed", justify="right")
    for heading in ("best (eV)", "last (eV)", "steps left out"):
        table.add_column(heading, justify="right")
    for seed, result in results.items():
        maes = (f"{value:.4f}" for value in (result.best_energy_mae, result.last_energy_mae))
        table.add_row(str(seed), *maes, str(len(result.skipped)))
    table.add_section()
    summary = summarize(results)
    table.add_row("mean", f"{summary.best_mean:.4f}", f"{summary.last_mean:.4f}", "")
    table.add_row("std", f"{summary.best_std:.4f}", f"{summary.last_std:.4f}", "")
    return table
