"""`molflt data baseline NAME [ROOT]`."""

from __future__ import annotations

import argparse
from typing import Any

from molflt.cli.evaluate import print_scores
from molflt.cli.shared import OK, add_command, add_group


def add_parser(commands: Any) -> None:
    kinds = add_group(commands, "baseline", "score a plain method on a shipped data set", "data sets", "NAME")
    parser = add_command(kinds, "fcc111", run, "score ridge regression on metal, adsorbate, number and site")
    parser.add_argument(
        "root", metavar="ROOT", nargs="?", default="datasets/fcc111", help="data set; %(default)s"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def run(arguments: argparse.Namespace) -> int:
    """Print the scores of both forms of the baseline."""
    from molflt.baseline import evaluate_fcc111_baseline

    print_scores(evaluate_fcc111_baseline(arguments.root), arguments.json)
    return OK
