"""`molflt train CONFIG`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from molflt.cli.settings import add_settings, given_config
from molflt.cli.shared import OK, add_command


def add_parser(commands: Any) -> None:
    """One option per setting of the configuration."""
    parser = add_command(commands, "train", run, "train a model as a YAML file says")
    add_settings(parser)
    parser.add_argument("--overwrite", action="store_true", help="replace an earlier run in the run folder")


def run(arguments: argparse.Namespace) -> int:
    """Train, and say where the best checkpoint is."""
    from molflt.run_folder import check_run_folder

    config = given_config(arguments)
    check_run_folder(Path(config.training.output), arguments.overwrite)

    from molflt.training import train

    result = train(config, overwrite=arguments.overwrite)
    mae = f"{config.data.val_splits[0]} MAE {result.best_energy_mae:.4f} eV"
    print(f"best checkpoint: {result.best_checkpoint} ({mae})")
    return OK
