"""Command-line options made from the fields of a dataclass.

This module imports no torch, so that the command line's help is instant.
"""

from __future__ import annotations

from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable
from dataclasses import field, fields
from pathlib import Path
from typing import Any

from molflt.errors import InputError

CLOCK = "wall: time passed; cpu: the process's CPU time, for a machine that has other work to do"


def parse_lengths(text: str) -> tuple[int, ...]:
    """`64,256,1024` as numbers."""
    try:
        return tuple(int(word) for word in text.split(","))
    except ValueError:
        raise ArgumentTypeError(f"must be numbers with commas between, got {text!r}") from None


def option(
    default: Any, parse: Callable[[str], Any], text: str, choices: tuple[str, ...] | None = None
) -> Any:
    """A dataclass field that is an option: how its word is read, what it means, and which words it may be."""
    return field(default=default, metadata={"type": parse, "help": text, "choices": choices})


def flag(name: str) -> str:
    """The option of a field."""
    return "--" + name.replace("_", "-")


def check_numbers(settings: Any, least: dict[str, int]) -> None:
    """Raise `InputError` for the first of the fields that is not None and below its least value."""
    for name, bound in least.items():
        value = getattr(settings, name)
        if value is not None and value < bound:
            raise InputError(f"{flag(name)} must be at least {bound}, got {value}")


def check_output(path: str) -> None:
    """Raise `InputError` where the folder for results is a file."""
    if Path(path).exists() and not Path(path).is_dir():
        raise InputError(f"--output {path} is a file; name a folder")


def add_options(parser: ArgumentParser, settings: type) -> None:
    """Give `parser` an option per field of the dataclass `settings`, all made by `option`."""
    for setting in fields(settings):
        default = setting.default
        shown = ",".join(map(str, default)) if isinstance(default, tuple) else default
        suffix = "" if default is None else f"; {shown}"
        choices = setting.metadata["choices"]
        parser.add_argument(
            flag(setting.name),
            type=setting.metadata["type"],
            choices=choices,
            metavar=None if choices else setting.name.upper(),
            default=default,
            help=setting.metadata["help"] + suffix,
        )


def read_options(settings: type, arguments: Namespace) -> Any:
    """The dataclass with the values of parsed options."""
    return settings(**{setting.name: getattr(arguments, setting.name) for setting in fields(settings)})
