"""The settings of a configuration as options of a command, and the configuration they make with its file."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from molflt.config import Config

_PREFIX = "setting:"


def add_settings(parser: argparse.ArgumentParser) -> None:
    """Add the argument CONFIG, a YAML file, and one option per setting that overrides it."""
    from molflt.config import config_keys

    parser.set_defaults(takes_settings=True)
    parser.add_argument("config", metavar="CONFIG", help="YAML file, such as configs/fcc111/flt.yaml")
    settings = parser.add_argument_group("settings", "each one overrides the same key of the file")
    for key, _, text in config_keys():
        settings.add_argument(
            f"--{key}", metavar="VALUE", help=text.replace("%", "%%"), dest=f"{_PREFIX}{key}"
        )


def given_config(arguments: argparse.Namespace) -> Config:
    """The checked configuration of a command line; `InputError` as `molflt.config.load_config`."""
    from molflt.config import load_config

    overrides = [
        f"--{name.removeprefix(_PREFIX)}={value}"
        for name, value in vars(arguments).items()
        if name.startswith(_PREFIX) and value is not None
    ]
    # What is no setting goes along: load_config knows the nearest valid one.
    return load_config(arguments.config, [*overrides, *arguments.unknown])
