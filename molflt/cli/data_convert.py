"""`molflt data convert SRC DST`."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from molflt.cli.shared import OK, SOME_FAILED, add_command, positive
from molflt.terminal import print_text


def add_parser(commands: Any) -> None:
    parser = add_command(
        commands, "convert", run, "convert between OC20-format LMDB, extended XYZ and ASE databases"
    )
    parser.add_argument("source", metavar="SRC", help="LMDB, ASE database, structure file, or folder of them")
    parser.add_argument(
        "destination",
        metavar="DST",
        help="file ending in .lmdb, .extxyz, .db or .aselmdb; else a folder for shards",
    )
    parser.add_argument(
        "--format", metavar="NAME", help="of shards in a folder: lmdb (default), extxyz, db, aselmdb"
    )
    parser.add_argument(
        "--shard-size", metavar="N", type=positive, help="structures per shard; by default all"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace DST once the new data are whole")
    parser.add_argument(
        "--skip-refused",
        action="store_true",
        help="leave out and list structures that are refused, instead of stopping at the first",
    )
    parser.add_argument(
        "--total-energy-as-label",
        action="store_true",
        help="take the total energy in the file as y_relaxed; it is no adsorption energy",
    )


def run(arguments: argparse.Namespace) -> int:
    """Convert, and print what was written and what was not carried."""
    from molflt.data.convert import convert

    report = convert(
        arguments.source,
        arguments.destination,
        output_format=arguments.format,
        shard_size=arguments.shard_size,
        overwrite=arguments.overwrite,
        skip_refused=arguments.skip_refused,
        total_energy_as_label=arguments.total_energy_as_label,
        progress=sys.stderr.isatty(),
    )
    print_text("\n".join(report.lines()) + "\n")
    return SOME_FAILED if report.refused else OK
