"""`molflt bench NAME`: measurements of speed, memory and quality, a subcommand each."""

from __future__ import annotations

import argparse
from typing import Any

from molflt.bench.attention_settings import add_arguments
from molflt.cli.shared import OK, add_command, add_group, print_note, print_tables


def add_parser(commands: Any) -> None:
    """Add `bench` and what is below it."""
    below = add_group(commands, "bench", "measure speed, memory and quality", "measurements", "NAME")
    add_arguments(add_command(below, "attention", _attention, "FLT beside the Performers and exact softmax"))
    _add_quality(below)


def _add_quality(below: Any) -> None:
    parser = add_command(
        below, "quality", _quality, "train variants of the attention alike and compare their errors"
    )
    parser.add_argument("--plan", required=True, metavar="NAME", help="fcc111, qm7 or charged-fragments")
    parser.add_argument("--seeds", type=_numbers, default=(0, 1, 2), metavar="N,N,...", help="0,1,2")
    parser.add_argument("--variants", type=_words, default=(), metavar="NAME,...", help="the plan's own")
    parser.add_argument(
        "--output",
        default="benchmarks/quality",
        metavar="DIR",
        help="results, a folder per plan; %(default)s",
    )
    parser.add_argument("--table", action="store_true", help="train nothing, print what the results say")


def _quality(arguments: argparse.Namespace) -> int:
    from pathlib import Path

    from molflt.bench.quality import QualityBench

    bench = QualityBench(arguments.plan, arguments.seeds, arguments.variants, Path(arguments.output))
    if not arguments.table:
        from molflt.training import train

        bench.run(lambda config: train(config, progress=False).output, print_note)
    print_tables(bench.table())
    return OK


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(word) for word in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be numbers with commas between, got {text!r}") from None


def _attention(arguments: argparse.Namespace) -> int:
    from molflt.bench.attention import run

    return run(arguments)
