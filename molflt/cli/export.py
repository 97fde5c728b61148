"""`molflt export CHECKPOINT OUTPUT`."""

from __future__ import annotations

import argparse
from typing import Any

from molflt.cli.shared import OK, add_command
from molflt.terminal import print_text


def add_parser(commands: Any) -> None:
    parser = add_command(
        commands, "export", run, "write a run's checkpoint without its training state, to predict with"
    )
    parser.add_argument(
        "checkpoint", metavar="CHECKPOINT", help="of a finished run, such as checkpoints/best.ckpt"
    )
    parser.add_argument("output", metavar="OUTPUT", help="file to write, NAME.ckpt")
    parser.add_argument(
        "--structures",
        metavar="PATH",
        action="append",
        default=[],
        help="file or folder, repeatable, whose predicted energies are kept in NAME.json beside it",
    )


def run(arguments: argparse.Namespace) -> int:
    """Export, and say what was written."""
    from molflt.export import export_checkpoint

    done = export_checkpoint(arguments.checkpoint, arguments.output, arguments.structures)
    print_text(
        f"{done.checkpoint}: {done.num_bytes / 1e6:.2f} MB, {done.num_parameters} parameters; {done.domain}\n"
    )
    if done.expected is not None:
        print_text(f"{done.expected}: what it predicts\n")
    return OK
