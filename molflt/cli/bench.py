"""`molflt bench NAME`: measurements of speed and memory, a subcommand each."""

from __future__ import annotations

import argparse
from typing import Any

from molflt.bench.attention_settings import add_arguments
from molflt.cli.shared import add_command, add_group


def add_parser(commands: Any) -> None:
    """Add `bench` and what is below it."""
    below = add_group(commands, "bench", "measure speed and memory", "measurements", "NAME")
    add_arguments(add_command(below, "attention", _attention, "FLT beside the Performers and exact softmax"))


def _attention(arguments: argparse.Namespace) -> int:
    from molflt.bench.attention import run

    return run(arguments)
