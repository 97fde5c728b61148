"""`molflt bench NAME`: measurements of speed and memory, a subcommand each."""

from __future__ import annotations

import argparse
from typing import Any

from molflt.bench.attention_settings import add_arguments, parse_lengths
from molflt.cli.shared import add_command, add_group, positive


def add_parser(commands: Any) -> None:
    """Add `bench` and what is below it."""
    below = add_group(commands, "bench", "measure speed and memory", "measurements", "NAME")
    add_arguments(add_command(below, "attention", _attention, "FLT beside the Performers and exact softmax"))
    model = add_command(below, "model", _model, "a training step of the whole model as one crystal grows")
    model.add_argument("config", nargs="?", metavar="CONFIG", help="YAML file; the defaults without one")
    model.add_argument(
        "--atoms",
        type=parse_lengths,
        default=(1000, 2000, 5000, 10000, 20000),
        metavar="N,N,...",
        help="numbers of atoms, multiples of 4; 1000,2000,5000,10000,20000",
    )
    model.add_argument("--repeats", type=positive, default=3, help="steps of which the best counts; 3")
    model.add_argument("--json", action="store_true", help="print JSON instead of the table")


def _attention(arguments: argparse.Namespace) -> int:
    from molflt.bench.attention import run

    return run(arguments)


def _model(arguments: argparse.Namespace) -> int:
    from molflt.bench.model import run

    return run(arguments)
