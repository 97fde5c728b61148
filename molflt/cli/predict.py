"""`molflt predict CHECKPOINT PATH...`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from molflt.cli.shared import (
    BAD_INPUT,
    OK,
    SOME_FAILED,
    add_command,
    add_device,
    count,
    positive,
    print_error,
    print_note,
    usable_device,
)
from molflt.errors import InputError
from molflt.terminal import print_tables

if TYPE_CHECKING:
    from molflt.prediction import Prediction, Predictor

    Sink = Callable[[Prediction | InputError], None]

TABLE_ROWS = 1000
"""Rows after which a table is printed and a new one begun, so that output keeps up with long inputs."""


def add_parser(commands: Any) -> None:
    parser = add_command(commands, "predict", run, "predict the relaxed energy of structure files")
    parser.add_argument(
        "checkpoint", metavar="CHECKPOINT", help="file, or the name of one shipped with molflt"
    )
    parser.add_argument(
        "files",
        metavar="PATH",
        nargs="+",
        help="structures in any format ASE reads (all frames), OC20 LMDBs, folders (all structure files "
        "below), patterns, or - for a list on standard input",
    )
    parser.add_argument(
        "--ensemble",
        metavar="CHECKPOINT",
        action="append",
        default=[],
        help="a further checkpoint, repeatable: predict the mean, with the standard deviation as uncertainty",
    )
    parser.add_argument(
        "--output",
        metavar="FILE",
        help="write a row per structure to FILE.csv or FILE.jsonl, or the structures with their rows to "
        "FILE.extxyz or FILE.db (ASE), instead of printing a table",
    )
    parser.add_argument(
        "--write-relaxed", metavar="DIR", help="write the predicted relaxed structures into this new folder"
    )
    parser.add_argument("--strict", action="store_true", help="stop at the first structure that fails")
    parser.add_argument(
        "--redraws",
        metavar="N",
        type=count,
        default=4,
        help="other draws of the random features over which a single checkpoint's uncertainty is taken, a "
        "pass each; 0: no uncertainty. It shows the error of the approximate attention, not the model's",
    )
    parser.add_argument(
        "--batch-size",
        metavar="N",
        type=positive,
        default=128,
        help="structures per batch; changes no result",
    )
    add_device(parser)


def run(arguments: argparse.Namespace) -> int:
    """Predict, and say how many failed by the exit status."""
    from molflt.prediction import Predictor, RelaxedFolder, check_output, expand_paths, iter_inputs

    if arguments.output is not None:
        check_output(arguments.output, arguments.files)
    predictor = Predictor.from_checkpoint(
        [arguments.checkpoint, *arguments.ensemble],
        usable_device(arguments.device),
        redraws=arguments.redraws,
        displacements=arguments.write_relaxed is not None,
    )
    relaxed = None
    if arguments.write_relaxed is not None:
        if not predictor.predicts_positions:
            raise InputError(
                "--write-relaxed needs networks that predict Δpos; train with optim.delta_pos_weight above 0"
            )
        relaxed = RelaxedFolder(arguments.write_relaxed)
    skipped: list[str] = []
    written = [path for path in (arguments.output, arguments.write_relaxed) if path is not None]
    # Names need be no text in the encoding of the terminal.
    listed = getattr(sys.stdin, "buffer", sys.stdin)
    paths = expand_paths(arguments.files, listed, exclude=written, on_skip=skipped.append)
    outcomes = predictor.iter_predict(iter_inputs(paths, predictor.radius), arguments.batch_size)
    predicted = failed = 0
    with _sink(arguments.output, predictor) as show:
        for row, outcome in enumerate(outcomes):
            show(outcome)
            if isinstance(outcome, InputError):
                failed += 1
                print_error(outcome)
                if arguments.strict:
                    break
            else:
                predicted += 1
                if relaxed is not None:
                    relaxed.write(row, outcome)
    if skipped:
        print_note(f"skipped {len(skipped)} files that are no structures, first {skipped[0]}")
    if not predicted:
        if not failed:
            raise InputError("no structures were given; name files, folders or patterns")
        return BAD_INPUT
    if arguments.output is not None and predictor.domain:
        print_note(f"checkpoint: {predictor.domain}")
    return SOME_FAILED if failed else OK


@contextmanager
def _sink(output: str | None, predictor: Predictor) -> Iterator[Sink]:
    """What takes outcomes one by one; whatever ends the block, those it took are in the output."""
    from molflt.prediction import open_writer

    with ExitStack() as stack:
        if output is not None:
            yield stack.enter_context(open_writer(output, predictor.energy_meaning)).write
            return
        tables = _Tables(predictor)
        stack.callback(tables.print)
        yield tables.add


class _Tables:
    """Prints predictions as tables, a thousand rows each."""

    def __init__(self, predictor: Predictor) -> None:
        self._predictor = predictor
        self._rows: list[Prediction] = []

    def add(self, outcome: Prediction | InputError) -> None:
        if not isinstance(outcome, InputError):
            self._rows.append(outcome)
        if len(self._rows) == TABLE_ROWS:
            self.print()

    def print(self) -> None:
        from molflt.tables import prediction_table

        if self._rows:
            predictor = self._predictor
            print_tables(prediction_table(self._rows, predictor.energy_meaning, predictor.domain))
            self._rows = []
