"""`molflt train CONFIG`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from molflt.cli.shared import OK, add_command


def add_parser(commands: Any) -> None:
    """One option per setting of the configuration."""
    from molflt.config import config_keys

    parser = add_command(commands, "train", run, "train a model as a YAML file says")
    parser.set_defaults(takes_settings=True)
    parser.add_argument("config", metavar="CONFIG", help="YAML file, such as configs/fcc111/flt.yaml")
    parser.add_argument("--overwrite", action="store_true", help="replace an earlier run in the run folder")
    parser.add_argument(
        "--resume",
        action="store_true",
        help="continue the run in the run folder; start it where there is none to continue",
    )
    settings = parser.add_argument_group("settings", "each one overrides the same key of the file")
    for key, _, text in config_keys():
        settings.add_argument(
            f"--{key}", metavar="VALUE", help=text.replace("%", "%%"), dest=f"setting:{key}"
        )


def run(arguments: argparse.Namespace) -> int:
    """Train, and say where the best checkpoint is."""
    from molflt.config import load_config
    from molflt.run_folder import check_run_folder

    overrides = []
    for name, value in vars(arguments).items():
        if name.startswith("setting:") and value is not None:
            overrides.append(f"--{name.removeprefix('setting:')}={value}")
    # What is no setting goes along: load_config knows the nearest valid one.
    config = load_config(arguments.config, [*overrides, *arguments.unknown])
    check_run_folder(Path(config.training.output), arguments.overwrite, arguments.resume)

    from molflt.training import train

    result = train(config, overwrite=arguments.overwrite, resume=arguments.resume)
    mae = f"{config.data.val_splits[0]} MAE {result.best_energy_mae:.4f} eV"
    print(f"best checkpoint: {result.best_checkpoint} ({mae})")
    return OK
