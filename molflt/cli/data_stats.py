"""`molflt data stats PATH`."""

from __future__ import annotations

import argparse
import json
from typing import Any

from molflt.cli.shared import OK, add_command
from molflt.terminal import print_tables, print_text


def add_parser(commands: Any) -> None:
    parser = add_command(commands, "stats", run, "measure mean and std of targets, Δpos and sizes of an LMDB")
    parser.add_argument("path", metavar="PATH", help="LMDB file, or folder of shards")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def run(arguments: argparse.Namespace) -> int:
    """Print the statistics."""
    from molflt.data.statistics import dataset_statistics, statistics_tables

    summary = dataset_statistics(arguments.path, progress=True).to_dict()
    if arguments.json:
        print_text(json.dumps(summary, indent=1) + "\n")
    else:
        print_tables(*statistics_tables(summary))
    return OK
