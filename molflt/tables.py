"""The tables that the command line prints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.table import Table

if TYPE_CHECKING:
    from molflt.evaluation import SplitScore
    from molflt.prediction import Prediction


def score_table(scores: Sequence[SplitScore]) -> Table:
    """Scores, a section per method."""
    table = Table()
    table.add_column("method")
    table.add_column("split")
    for heading in ("energy MAE (eV)", "EwT (%)", "systems"):
        table.add_column(heading, justify="right")
    for number, row in enumerate(scores):
        if number and row.method != scores[number - 1].method:
            table.add_section()
        table.add_row(
            row.method, row.split, f"{row.energy_mae:.4f}", f"{100 * row.ewt:.2f}", str(row.num_systems)
        )
    return table


def prediction_table(predictions: Sequence[Prediction], energy_meaning: str) -> Table:
    """Predictions, the meaning of the energy below them."""
    table = Table(caption=f"energy: {energy_meaning}")
    table.add_column("structure", overflow="fold")
    table.add_column("frame", justify="right")
    table.add_column("formula")
    table.add_column("atoms", justify="right")
    table.add_column("energy (eV)", justify="right")
    table.add_column("tags")
    table.add_column("notes", overflow="fold")
    for row in predictions:
        table.add_row(
            row.source,
            str(row.frame),
            row.formula,
            str(row.n_atoms),
            f"{row.energy:.4f}",
            row.tag_source,
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
