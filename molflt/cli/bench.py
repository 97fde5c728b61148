"""`molflt bench NAME`: measurements of speed and memory, a subcommand each."""

from __future__ import annotations

import argparse
from typing import Any

from molflt.bench import attention_settings, training_settings
from molflt.cli.shared import add_command, add_group


def add_parser(commands: Any) -> None:
    """Add `bench` and what is below it."""
    below = add_group(commands, "bench", "measure speed and memory", "measurements", "NAME")
    attention = add_command(below, "attention", _attention, "FLT beside the Performers and exact softmax")
    attention_settings.add_arguments(attention)
    training = add_command(below, "training", _training, "training speed, and what the loop adds")
    training_settings.add_arguments(training)


def _attention(arguments: argparse.Namespace) -> int:
    from molflt.bench.attention import run

    return run(arguments)


def _training(arguments: argparse.Namespace) -> int:
    from molflt.bench.training import run

    return run(arguments)
