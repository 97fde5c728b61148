"""`molflt leaderboard make | check | score`."""

from __future__ import annotations

import argparse
from typing import Any

from molflt.cli.evaluate import print_scores
from molflt.cli.shared import (
    OK,
    SOME_FAILED,
    add_command,
    add_device,
    add_group,
    check_output_file,
    positive,
    positive_number,
    print_error,
    print_note,
    usable_device,
)
from molflt.errors import InputError
from molflt.terminal import print_text


def add_parser(commands: Any) -> None:
    """The three subcommands."""
    below = add_group(commands, "leaderboard", "make, check and score files for OC20's IS2RE leaderboard")
    make = add_command(below, "make", run_make, "predict the four splits into a leaderboard file")
    make.add_argument("output", metavar="OUT", help="file to write, .npz")
    make.add_argument("checkpoints", metavar="CHECKPOINT", nargs="+", help="of several the mean is written")
    _add_data(make, "test")
    make.add_argument("--batch-size", metavar="N", type=positive, help="systems per batch")
    add_device(make)
    check = add_command(below, "check", run_check, "compare a leaderboard file with a data set")
    check.add_argument("file", metavar="FILE", help="the .npz file")
    _add_data(check, "test")
    scored = add_command(below, "score", run_score, "score a leaderboard file on labelled data")
    scored.add_argument("file", metavar="FILE", help="the .npz file")
    _add_data(scored, "val")
    scored.add_argument(
        "--threshold", metavar="EV", type=positive_number, default=0.02, help="of EwT; %(default)s eV"
    )
    scored.add_argument("--json", action="store_true", help="print JSON instead of a table")


def _add_data(parser: argparse.ArgumentParser, part: str) -> None:
    parser.add_argument("--data", metavar="ROOT", required=True, help="data set")
    parser.add_argument(
        "--part",
        metavar="NAME",
        default=part,
        help="the splits are NAME_id, NAME_ood_ads, NAME_ood_cat and NAME_ood_both; %(default)s",
    )


def run_make(arguments: argparse.Namespace) -> int:
    """Write the file."""
    check_output_file(arguments.output, ".npz", [*arguments.checkpoints, arguments.data])

    from molflt.evaluation import make_leaderboard

    counts = make_leaderboard(
        arguments.checkpoints,
        arguments.data,
        arguments.output,
        arguments.part,
        arguments.batch_size,
        usable_device(arguments.device),
    )
    numbers = ", ".join(f"{domain} {count}" for domain, count in counts.items())
    print_note(f"wrote {arguments.output}: {numbers} systems")
    return OK


def run_check(arguments: argparse.Namespace) -> int:
    """A line per problem on stderr; status 1 where there is one."""
    from molflt.evaluation import check_leaderboard

    problems = check_leaderboard(arguments.file, arguments.data, arguments.part)
    for problem in problems:
        print_error(InputError(f"{arguments.file}: {problem}"))
    if not problems:
        print_text(f"{arguments.file} fits {arguments.data} ({arguments.part})\n")
    return SOME_FAILED if problems else OK


def run_score(arguments: argparse.Namespace) -> int:
    """Print the scores."""
    from molflt.evaluation import score_leaderboard

    print_scores(
        score_leaderboard(arguments.file, arguments.data, arguments.part, arguments.threshold), arguments.json
    )
    return OK
