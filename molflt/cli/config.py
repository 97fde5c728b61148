"""`molflt config show CONFIG` and `molflt config validate CONFIG...`."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from molflt.cli.settings import add_settings, given_config
from molflt.cli.shared import OK, add_command, add_group
from molflt.terminal import print_text


def add_parser(commands: Any) -> None:
    """`show` takes the settings that `molflt train` takes."""
    config = add_group(commands, "config", "show or check configurations")
    show = add_command(config, "show", run_show, "print a configuration, complete, as YAML")
    add_settings(show)
    validate = add_command(config, "validate", run_validate, "check configurations, without reading data")
    validate.add_argument("configs", metavar="CONFIG", nargs="+", help="YAML file")


def run_show(arguments: argparse.Namespace) -> int:
    """Print what `molflt train` would train with the same words."""
    from molflt.config import config_to_yaml

    # A stream that cannot hold every character gets YAML's escapes.
    utf8 = (sys.stdout.encoding or "utf-8").lower().startswith("utf")
    print_text(config_to_yaml(given_config(arguments), allow_unicode=utf8))
    return OK


def run_validate(arguments: argparse.Namespace) -> int:
    """Say `ok` per file, up to the first one that is not."""
    from molflt.config import load_config

    for path in arguments.configs:
        load_config(path)
        print_text(f"{path}: ok\n")
    return OK
