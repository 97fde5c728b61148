"""`molflt train CONFIG`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from molflt.cli.settings import add_settings, given_config
from molflt.cli.shared import OK, add_command, print_note, seeds
from molflt.terminal import print_tables, print_text

if TYPE_CHECKING:
    from molflt.training import TrainingResult


def add_parser(commands: Any) -> None:
    """One option per setting of the configuration."""
    parser = add_command(commands, "train", run, "train a model as a YAML file says")
    add_settings(parser)
    parser.add_argument("--overwrite", action="store_true", help="replace an earlier run in the run folder")
    parser.add_argument(
        "--resume",
        action="store_true",
        help="continue the run in the run folder; start it where there is none to continue",
    )
    parser.add_argument(
        "--seeds",
        type=seeds,
        metavar="N,N,...",
        help="train once with each of these seeds, in the folders seed-N of the run folder, whose seeds.json "
        "then has each one's errors, their mean and standard deviation",
    )


def run(arguments: argparse.Namespace) -> int:
    """Train, and say where the best checkpoints are."""
    from molflt.run_folder import check_run_folder, is_first_process

    config = given_config(arguments)
    how = {"overwrite": arguments.overwrite, "resume": arguments.resume}
    if arguments.seeds is None and is_first_process():
        check_run_folder(Path(config.training.output), **how)

    # Fails fast above: this imports torch.
    from molflt.training import train, train_seeds

    if arguments.seeds is None:
        results = {config.seed: train(config, **how)}
    else:
        results = train_seeds(config, arguments.seeds, **how)
    if not is_first_process():
        return OK
    for seed, result in results.items():
        report(result, config.data.val_splits[0], f"seed {seed}: " if len(results) > 1 else "")
    if arguments.seeds is not None:
        from molflt.tables import seed_table

        print_tables(seed_table(results, config.data.val_splits[0]))
    return OK


def report(result: TrainingResult, split: str, prefix: str) -> None:
    """Where the best checkpoint is, and what was left out."""
    weights = "EMA weights, " if result.averaged else ""
    mae = f"{weights}{split} MAE {result.best_energy_mae:.4f} eV"
    print_text(f"{prefix}best checkpoint: {result.best_checkpoint} ({mae})\n")
    if result.skipped:
        count = len(result.skipped)
        print_note(f"{prefix}left out {count} steps that were not finite; the first: {result.skipped[0]}")
