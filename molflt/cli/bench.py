"""`molflt bench NAME`: measurements of speed, memory and quality, a subcommand each."""

from __future__ import annotations

import argparse
import json
from typing import Any

from molflt.bench.attention_settings import AttentionBenchSettings
from molflt.bench.options import CLOCK, add_options, parse_lengths
from molflt.bench.training_settings import TrainingBenchSettings
from molflt.cli.shared import OK, add_command, add_group, count, positive, positive_number, print_note, seeds
from molflt.terminal import print_tables, print_text


def add_parser(commands: Any) -> None:
    """Add `bench` and what is below it."""
    below = add_group(commands, "bench", "measure speed, memory and quality", "measurements", "NAME")
    attention = add_command(below, "attention", _attention, "FLT beside the Performers and exact softmax")
    add_options(attention, AttentionBenchSettings)
    _add_graphs(add_command(below, "graphs", _graphs, "the periodic radius graph beside ASE's neighbor_list"))
    _add_model(add_command(below, "model", _model, "a training step of the whole model as one crystal grows"))
    training = add_command(below, "training", _training, "training speed, and what the loop adds")
    add_options(training, TrainingBenchSettings)
    _add_prediction(
        add_command(below, "prediction", _prediction, "structures per second from files, and start-up")
    )
    _add_symmetry(
        add_command(
            below,
            "symmetry",
            _symmetry,
            "how far energies change where nothing physical does, such as rotation",
        )
    )
    _add_quality(below)


def _add_quality(below: Any) -> None:
    parser = add_command(
        below, "quality", _quality, "train variants of the attention alike and compare their errors"
    )
    parser.add_argument("--plan", required=True, metavar="NAME", help="fcc111, qm7 or charged-fragments")
    parser.add_argument("--seeds", type=seeds, default=[0, 1, 2], metavar="N,N,...", help="0,1,2")
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

    bench = QualityBench(arguments.plan, tuple(arguments.seeds), arguments.variants, Path(arguments.output))
    if not arguments.table:
        from molflt.training import train

        bench.run(lambda config: train(config, progress=False).output, print_note)
    print_tables(bench.table())
    return OK


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def _attention(arguments: argparse.Namespace) -> int:
    from molflt.bench.attention import run

    return run(arguments)


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", nargs="?", metavar="CONFIG", help="YAML file; the defaults without one")
    parser.add_argument(
        "--atoms",
        type=parse_lengths,
        default=(1000, 2000, 5000, 10000, 20000),
        metavar="N,N,...",
        help="numbers of atoms, multiples of 4; 1000,2000,5000,10000,20000",
    )
    parser.add_argument("--repeats", type=positive, default=3, help="steps of which the best counts; 3")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")


def _model(arguments: argparse.Namespace) -> int:
    from molflt.bench.model import run

    return run(arguments)


def _training(arguments: argparse.Namespace) -> int:
    from molflt.bench.training import run

    return run(arguments)


def _add_graphs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--atoms", metavar="N", type=positive, default=1000, help="in the cell; %(default)s")
    parser.add_argument(
        "--radius", metavar="Å", type=positive_number, default=6.0, help="cutoff; %(default)s"
    )
    _add_conditions(parser, 15, "cpu")


def _add_prediction(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--checkpoint", metavar="CHECKPOINT", default="fcc111-flt", help="file or shipped name; %(default)s"
    )
    parser.add_argument(
        "--structures", metavar="N", type=positive, default=256, help="per format; %(default)s"
    )
    parser.add_argument(
        "--batch-size", metavar="N", type=positive, default=128, help="of the batched runs; %(default)s"
    )
    parser.add_argument(
        "--redraws", metavar="N", type=count, default=4, help="as in `molflt predict`; %(default)s"
    )
    parser.add_argument("--threads", metavar="N", type=positive, help="of torch; by default its own choice")
    _add_conditions(parser, 5, "wall")


def _add_symmetry(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "checkpoint", metavar="CHECKPOINT", help="file, or the name of one shipped with molflt"
    )
    parser.add_argument("--data", metavar="ROOT", help="data set; by default the one trained on")
    parser.add_argument("--split", metavar="NAME", help="by default the first that is not the training's")
    parser.add_argument("--systems", metavar="N", type=positive, default=96, help="how many; %(default)s")
    parser.add_argument("--seed", metavar="N", type=count, default=0, help="of the rotations; %(default)s")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")


def _symmetry(arguments: argparse.Namespace) -> int:
    from dataclasses import asdict

    from rich.console import Console

    from molflt.bench.symmetry import bench_symmetry, symmetry_table
    from molflt.checkpoint import load_checkpoint

    checkpoint = load_checkpoint(arguments.checkpoint)
    with Console(stderr=True).status("starting") as status:
        results = bench_symmetry(
            checkpoint,
            arguments.data,
            arguments.split,
            arguments.systems,
            arguments.seed,
            progress=status.update,
        )
    if arguments.json:
        print_text(json.dumps([asdict(result) for result in results], indent=1) + "\n")
    else:
        print_tables(symmetry_table(results))
    return OK


def _add_conditions(parser: argparse.ArgumentParser, repeats: int, clock: str) -> None:
    parser.add_argument("--repeats", metavar="N", type=positive, default=repeats, help="rounds; %(default)s")
    parser.add_argument(
        "--clock",
        choices=("wall", "cpu"),
        default=clock,
        help=f"{CLOCK}; %(default)s",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")


def _graphs(arguments: argparse.Namespace) -> int:
    from molflt.bench.graphs import bench_graphs, graph_json, graph_table

    result = bench_graphs(arguments.atoms, arguments.radius, arguments.repeats, arguments.clock)
    if arguments.json:
        print_text(json.dumps(graph_json(result), indent=1) + "\n")
    else:
        print_tables(graph_table(result))
    return OK


def _prediction(arguments: argparse.Namespace) -> int:
    from rich.console import Console

    from molflt.bench.prediction import bench_prediction, prediction_json, prediction_tables

    with Console(stderr=True).status("starting") as status:
        result = bench_prediction(
            arguments.checkpoint,
            number=arguments.structures,
            batch_size=arguments.batch_size,
            redraws=arguments.redraws,
            repeats=arguments.repeats,
            clock=arguments.clock,
            threads=arguments.threads,
            progress=status.update,
        )
    if arguments.json:
        print_text(json.dumps(prediction_json(result), indent=1) + "\n")
    else:
        print_tables(*prediction_tables(result))
    return OK
