"""`molflt data inspect PATH`."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from molflt.cli.shared import OK, add_command
from molflt.terminal import print_tables, print_text


def add_parser(commands: Any) -> None:
    parser = add_command(commands, "inspect", run, "summarise an OC20-format LMDB")
    parser.add_argument("path", metavar="PATH", help="LMDB file, or folder of shards")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def run(arguments: argparse.Namespace) -> int:
    """Print the summary."""
    from molflt.data.inspect import inspect_lmdb

    summary = inspect_lmdb(arguments.path, progress=sys.stderr.isatty())
    if arguments.json:
        print_text(json.dumps(summary, indent=1) + "\n")
    else:
        from molflt.tables import inspection_tables

        print_tables(*inspection_tables(summary))
    return OK
