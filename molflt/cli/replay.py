"""`molflt replay FILE`: a training step that was not finite, once more."""

from __future__ import annotations

import argparse
from typing import Any

from molflt.cli.shared import OK, add_command
from molflt.terminal import print_tables

SHOWN = 8
"""Names in a cell."""


def add_parser(commands: Any) -> None:
    """Add the command."""
    parser = add_command(commands, "replay", run, "repeat a training step that was not finite")
    parser.add_argument("file", metavar="FILE", help="file in the folder nonfinite of a run")


def run(arguments: argparse.Namespace) -> int:
    """Print where the step fails."""
    from rich.table import Table

    from molflt.training.replay import replay

    result = replay(arguments.file)
    table = Table("what", "value", title=f"step {result.step.step} of rank {result.step.rank}")
    table.add_row("loss as reported", str(result.step.loss))
    table.add_row("loss now", str(result.loss))
    rows = {
        "first output that is not finite": [result.first_module] if result.first_module else [],
        "energies that are not finite": [f"sid {sid}: {value} eV" for sid, value in result.energies.items()],
        "fields of the batch that are not finite": result.fields,
        "weights that are not finite": result.weights,
        "gradients that are not finite": result.gradients,
    }
    for what, found in rows.items():
        more = [f"{len(found) - SHOWN} more"] if len(found) > SHOWN else []
        table.add_row(what, ", ".join([*found[:SHOWN], *more]) or "none")
    print_tables(table)
    return OK
