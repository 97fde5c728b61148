"""`molflt evaluate CHECKPOINT...`, in one process or in several that a launcher such as torchrun starts."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from molflt.cli.shared import (
    BAD_INPUT,
    OK,
    add_command,
    add_device,
    check_output_file,
    positive,
    positive_number,
    print_note,
    usable_device,
)
from molflt.errors import InputError
from molflt.terminal import print_tables, print_text

if TYPE_CHECKING:
    from molflt.evaluation import SplitScore

GROUPINGS = ("element", "adsorbate", "metal", "size", "tag")


def add_parser(commands: Any) -> None:
    parser = add_command(commands, "evaluate", run, "score checkpoints on labelled splits")
    parser.add_argument(
        "checkpoints",
        metavar="CHECKPOINT",
        nargs="+",
        help="file, or the name of one shipped with molflt; of several (seeds) also the mean with standard "
        "deviation, and the ensemble's own score",
    )
    parser.add_argument("--data", metavar="ROOT", help="data set; by default the one trained on")
    parser.add_argument(
        "--split",
        metavar="NAME",
        action="append",
        help="split to score, repeatable; by default all but the training's",
    )
    parser.add_argument(
        "--by",
        metavar="KIND",
        action="append",
        choices=GROUPINGS,
        default=[],
        help=f"also score each {', '.join(GROUPINGS)} of systems; repeatable. tag: which of the tags 0, 1 "
        "and 2 a system has, and how many adsorbed atoms (tag 2)",
    )
    parser.add_argument(
        "--threshold",
        metavar="EV",
        type=positive_number,
        default=0.02,
        help="EwT is the share of errors strictly below it; %(default)s eV",
    )
    parser.add_argument(
        "--batch-size",
        metavar="N",
        type=positive,
        help="systems per batch; like the number of processes it changes energies by less than 1e-5 eV",
    )
    add_device(parser)
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument("--csv", metavar="FILE", help="write each system's prediction to FILE.csv")
    parser.add_argument("--report", metavar="FILE", help="write a self-contained report to FILE.html")


def run(arguments: argparse.Namespace) -> int:
    """Print the scores, and write what was asked for."""
    for output, suffix in ((arguments.csv, ".csv"), (arguments.report, ".html")):
        if output is not None:
            check_output_file(output, suffix, [*arguments.checkpoints, arguments.data or ""])

    from molflt.evaluation import evaluate_checkpoints, joined_processes, write_csv, write_report

    with joined_processes() as rank:
        try:
            evaluation = evaluate_checkpoints(
                arguments.checkpoints,
                arguments.data,
                arguments.split,
                arguments.batch_size,
                threshold=arguments.threshold,
                by=list(dict.fromkeys(arguments.by)),
                with_systems=bool(arguments.csv or arguments.report),
                device=usable_device(arguments.device),
            )
        except InputError:
            if rank:  # the first process says it
                return BAD_INPUT
            raise
    if rank:
        return OK
    for output, write in ((arguments.csv, write_csv), (arguments.report, write_report)):
        if output is not None:
            write(output, evaluation)
    print_scores([*evaluation.scores, *evaluation.breakdown], arguments.json)
    for output in (arguments.csv, arguments.report):
        if output is not None:
            print_note(f"wrote {output}")
    return OK


def print_scores(scores: Sequence[SplitScore], as_json: bool) -> None:
    """Scores on stdout, as tables or as JSON."""
    if as_json:
        from molflt.evaluation import scores_json

        print_text(json.dumps(scores_json(scores), indent=1) + "\n")
    else:
        from molflt.tables import score_tables

        print_tables(*score_tables(scores))
