"""`molflt data split SRC DST`."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from molflt.cli.shared import OK, add_command
from molflt.terminal import print_text


def add_parser(commands: Any) -> None:
    parser = add_command(commands, "split", run, "split an OC20-format LMDB, whole groups at a time")
    parser.add_argument("source", metavar="SRC", help="LMDB file, or folder of shards")
    parser.add_argument("destination", metavar="DST", help="folder to make, with a folder per split")
    parser.add_argument(
        "--fractions",
        metavar="NAME=SHARE,...",
        default="train=0.8,val=0.1,test=0.1",
        help="splits and their shares; %(default)s",
    )
    parser.add_argument(
        "--by",
        metavar="GROUP",
        default="sid",
        help="what stays together: sid (random split), formula, elements, catalyst, adsorbate; %(default)s",
    )
    parser.add_argument(
        "--hold-out",
        metavar="ELEMENT",
        action="append",
        default=[],
        help="put every system with this element into the split held_out; repeatable",
    )
    parser.add_argument(
        "--seed", metavar="N", type=int, default=0, help="another seed splits otherwise; %(default)s"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace DST once the new data are whole")


def run(arguments: argparse.Namespace) -> int:
    """Split, and print the sizes."""
    from molflt.data.splitting import parse_fractions, split_lmdb

    report = split_lmdb(
        arguments.source,
        arguments.destination,
        parse_fractions(arguments.fractions),
        by=arguments.by,
        hold_out=arguments.hold_out,
        seed=arguments.seed,
        overwrite=arguments.overwrite,
        progress=sys.stderr.isatty(),
    )
    print_text("\n".join(report.lines()) + "\n")
    return OK
