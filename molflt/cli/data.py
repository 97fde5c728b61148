"""`molflt data`: the subcommands that make, describe and change data sets, a module each."""

from __future__ import annotations

from typing import Any

from molflt.cli import data_baseline, data_build, data_convert, data_inspect, data_split, data_stats
from molflt.cli.shared import add_group


def add_parser(commands: Any) -> None:
    """Add `data` and what is below it."""
    below = add_group(commands, "data", "build, describe, convert and split data sets")
    for command in (data_build, data_baseline, data_inspect, data_stats, data_convert, data_split):
        command.add_parser(below)
