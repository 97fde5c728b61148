"""The command line: each subcommand is a thin call into one module.

Modules that import torch are imported by the subcommand that needs them, so that help and errors in the
arguments are instant. What is wrong with the input is one line on stderr and exit status 2.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from molflt.errors import InputError

if TYPE_CHECKING:
    from rich.table import Table

    from molflt.data.structures import Structure
    from molflt.evaluation import SplitScore
    from molflt.prediction import Prediction

OK, SOME_FAILED, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status.

    0: done; 1: `predict` could not read some of its structures; 2: bad input, said in one line on stderr;
    130: interrupted. With `--debug` bad input raises instead.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in words
    try:
        status = run([word for word in words if word != "--debug"])
        sys.stdout.flush()
        return status
    except InputError as error:
        if debug:
            raise
        print_error(error)
        return BAD_INPUT
    except KeyboardInterrupt:
        print("molflt: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of our output has gone; Python's own flush at exit must not fail on it again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK


def run(words: Sequence[str]) -> int:
    """Parse the words of a command and carry it out."""
    parser = make_parser()
    try:
        namespace, unknown = parser.parse_known_args(words)
    except SystemExit:  # argparse ends --help and --version with it, and nothing else: see _Parser.error
        return OK
    if unknown and not (namespace.run is _train and unknown[0].startswith("--")):
        parser.error(f"unknown argument {unknown[0]}")
    namespace.unknown = unknown
    return namespace.run(namespace)


def print_error(error: Exception) -> None:
    """One line on stderr."""
    print("molflt: error:", " ".join(str(error).split()), file=sys.stderr)


class _Parser(argparse.ArgumentParser):
    """Reports a wrong argument as `InputError`, hence in one line."""

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message}; see {self.prog} --help")


class _Version(argparse.Action):
    """Looks the version up only when asked for."""

    def __call__(self, parser: argparse.ArgumentParser, *args: Any) -> NoReturn:
        from importlib.metadata import version

        print("molflt", version("molflt"))
        parser.exit()


def make_parser() -> argparse.ArgumentParser:
    """The parser of all subcommands; `namespace.run(namespace)` runs the one given."""
    parser = _Parser(
        prog="molflt", description="Train, evaluate and use relaxed-energy models.", allow_abbrev=False
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="show the version and exit")
    parser.add_argument(
        "--debug", action="store_true", help="show the traceback of an error; any subcommand takes it"
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_train(commands)
    _add_evaluate(commands)
    _add_predict(commands)
    data = commands.add_parser("data", help="build and inspect data sets", allow_abbrev=False)
    data_commands = data.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_data_build(data_commands)
    _add_data_baseline(data_commands)
    _add_data_inspect(data_commands)
    return parser


def _command(
    commands: Any, name: str, run: Callable[[argparse.Namespace], int], text: str
) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        name, help=text, description=text[0].upper() + text[1:] + ".", allow_abbrev=False
    )
    parser.set_defaults(run=run)
    return parser


def _add_train(commands: Any) -> None:
    from molflt.config import config_keys

    parser = _command(commands, "train", _train, "train a model as a YAML file says")
    parser.add_argument("config", metavar="CONFIG", help="YAML file, such as configs/fcc111/flt.yaml")
    parser.add_argument("--overwrite", action="store_true", help="replace an earlier run in the run folder")
    settings = parser.add_argument_group("settings", "each one overrides the same key of the file")
    for key, _, text in config_keys():
        settings.add_argument(
            f"--{key}", metavar="VALUE", help=text.replace("%", "%%"), dest=f"setting:{key}"
        )


def _add_evaluate(commands: Any) -> None:
    parser = _command(commands, "evaluate", _evaluate, "score a checkpoint on labelled splits")
    parser.add_argument(
        "checkpoint", metavar="CHECKPOINT", help="such as runs/fcc111-flt/checkpoints/best.ckpt"
    )
    parser.add_argument("--data", metavar="ROOT", help="data set; by default the one trained on")
    parser.add_argument(
        "--split",
        metavar="NAME",
        action="append",
        help="split to score, repeatable; by default all but the training's",
    )
    parser.add_argument(
        "--batch-size", metavar="N", type=_positive, help="systems per batch; changes no result"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def _add_predict(commands: Any) -> None:
    parser = _command(commands, "predict", _predict, "predict the relaxed energy of structure files")
    parser.add_argument(
        "checkpoint", metavar="CHECKPOINT", help="such as runs/fcc111-flt/checkpoints/best.ckpt"
    )
    parser.add_argument(
        "files", metavar="FILE", nargs="+", help="structures in any format ASE reads, all frames"
    )
    parser.add_argument(
        "--output", metavar="FILE", help="write the predictions to FILE.csv or FILE.json instead"
    )
    parser.add_argument(
        "--batch-size",
        metavar="N",
        type=_positive,
        default=32,
        help="structures per batch; changes no result",
    )


def _add_data_build(commands: Any) -> None:
    build = commands.add_parser("build", help="build a shipped data set from its source", allow_abbrev=False)
    kinds = build.add_subparsers(title="data sets", metavar="NAME", required=True)
    for name, run, source, output in (
        ("fcc111", _build_fcc111, "fcc111_adsorption.json", "datasets/fcc111"),
        ("oc20-sample", _build_oc20_sample, "the raw OC20 fields", "datasets/oc20_sample"),
    ):
        parser = _command(kinds, name, run, f"build {output}")
        parser.add_argument("source", metavar="SOURCE", help=source)
        parser.add_argument("output", metavar="OUT", nargs="?", default=output, help="folder; %(default)s")


def _add_data_baseline(commands: Any) -> None:
    baseline = commands.add_parser(
        "baseline", help="score a plain method on a shipped data set", allow_abbrev=False
    )
    kinds = baseline.add_subparsers(title="data sets", metavar="NAME", required=True)
    parser = _command(
        kinds, "fcc111", _baseline_fcc111, "score ridge regression on metal, adsorbate, number and site"
    )
    parser.add_argument(
        "root", metavar="ROOT", nargs="?", default="datasets/fcc111", help="data set; %(default)s"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def _add_data_inspect(commands: Any) -> None:
    parser = _command(commands, "inspect", _inspect, "summarise an OC20-format LMDB")
    parser.add_argument("path", metavar="PATH", help="LMDB file, or folder of shards")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {number}")
    return number


def _train(arguments: argparse.Namespace) -> int:
    from molflt.config import load_config
    from molflt.run_folder import check_run_folder

    overrides = []
    for name, value in vars(arguments).items():
        if name.startswith("setting:") and value is not None:
            overrides.append(f"--{name.removeprefix('setting:')}={value}")
    # What is no setting goes along: load_config knows the nearest valid one.
    config = load_config(arguments.config, [*overrides, *arguments.unknown])
    check_run_folder(Path(config.training.output), arguments.overwrite)

    from molflt.training import train

    result = train(config, overwrite=arguments.overwrite)
    mae = f"{config.data.val_splits[0]} MAE {result.best_energy_mae:.4f} eV"
    print(f"best checkpoint: {result.best_checkpoint} ({mae})")
    return OK


def _evaluate(arguments: argparse.Namespace) -> int:
    from molflt.evaluation import evaluate

    _print_scores(
        evaluate(arguments.checkpoint, arguments.data, arguments.split, arguments.batch_size), arguments.json
    )
    return OK


def _predict(arguments: argparse.Namespace) -> int:
    from molflt.prediction import Predictor, check_output, write_predictions

    if arguments.output is not None:
        check_output(arguments.output)
    predictor = Predictor.from_checkpoint(arguments.checkpoint)
    outcomes: list[Prediction | InputError] = []
    for outcome in predictor.iter_predict(_structures(arguments.files), arguments.batch_size):
        outcomes.append(outcome)
        if isinstance(outcome, InputError):
            print_error(outcome)
    predictions = [outcome for outcome in outcomes if not isinstance(outcome, InputError)]
    if arguments.output is not None:
        write_predictions(arguments.output, outcomes, predictor.energy_meaning)
    elif predictions:
        from molflt.tables import prediction_table

        _print(prediction_table(predictions, predictor.energy_meaning))
    if not predictions:
        return BAD_INPUT
    return OK if len(predictions) == len(outcomes) else SOME_FAILED


def _structures(paths: Iterable[str]) -> Iterator[Structure | InputError]:
    from molflt.data.structures import iter_structures

    for path in paths:
        yield from iter_structures(path)


def _build_fcc111(arguments: argparse.Namespace) -> int:
    from molflt.data.fcc111 import build_fcc111

    build_fcc111(arguments.source, arguments.output)
    return OK


def _build_oc20_sample(arguments: argparse.Namespace) -> int:
    from molflt.data.oc20_sample import build_oc20_sample

    build_oc20_sample(arguments.source, arguments.output)
    return OK


def _inspect(arguments: argparse.Namespace) -> int:
    from molflt.data.inspect import inspect_lmdb

    summary = inspect_lmdb(arguments.path, progress=sys.stderr.isatty())
    if arguments.json:
        print(json.dumps(summary, indent=1))
    else:
        from molflt.tables import inspection_tables

        _print(*inspection_tables(summary))
    return OK


def _baseline_fcc111(arguments: argparse.Namespace) -> int:
    from molflt.baseline import evaluate_fcc111_baseline

    _print_scores(evaluate_fcc111_baseline(arguments.root), arguments.json)
    return OK


def _print_scores(scores: Sequence[SplitScore], as_json: bool) -> None:
    if as_json:
        print(json.dumps([asdict(row) for row in scores], indent=1))
    else:
        from molflt.tables import score_table

        _print(score_table(scores))


def _print(*tables: Table) -> None:
    from rich.console import Console

    # Where no terminal sets the width (a pipe, a file), lines are as long as their content.
    width = None if sys.stdout.isatty() else 1000
    console = Console(width=width, markup=False, emoji=False, highlight=False)
    with console.capture() as capture:
        for table in tables:
            console.print(table)
    sys.stdout.write(capture.get())
