"""The command line: each subcommand is a module with `add_parser` and `run`, a thin call into the library.

Modules that import torch are imported by the subcommand that needs them, so that help and errors in the
arguments are instant. What is wrong with the input is one line on stderr and exit status 2.

A new subcommand is a module here that defines `add_parser(commands)` and `run(namespace) -> int`, and its
name in `make_parser` (below `molflt data`: in `molflt.cli.data`).
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from molflt.cli import bench, config, data, evaluate, export, leaderboard, predict, replay, train
from molflt.cli.shared import BAD_INPUT, INTERRUPTED, OK, Parser, one_line_warnings, print_error
from molflt.errors import InputError

__all__ = ["main", "make_parser", "run"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status.

    0: done; 1: some of the input failed (`predict`: structures that could not be read); 2: bad input, said in
    one line on stderr, or a file or connection that failed; 130: interrupted. With `--debug` what status 2 is
    for raises instead.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in words
    try:
        with one_line_warnings():
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
    except OSError as error:
        if debug:
            raise
        where = f" {error.filename}" if error.filename else ""
        print_error(
            InputError(
                f"cannot read or write{where}: {error.strerror or error}; see that it is there, may be used "
                "and has room (--debug shows the place in the program)"
            )
        )
        return BAD_INPUT


def run(words: Sequence[str]) -> int:
    """Parse the words of a command and carry it out."""
    parser = make_parser()
    try:
        namespace, unknown = parser.parse_known_args(words)
    except SystemExit:  # argparse ends --help and --version with it, and nothing else: see Parser.error
        return OK
    namespace.unknown = unknown
    return namespace.run(namespace)


def make_parser() -> argparse.ArgumentParser:
    """The parser of all subcommands; `namespace.run(namespace)` runs the one given."""
    parser = Parser(
        prog="molflt", description="Train, evaluate and use relaxed-energy models.", allow_abbrev=False
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="show the version and exit")
    parser.add_argument(
        "--debug", action="store_true", help="show the traceback of an error; any subcommand takes it"
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in (train, evaluate, predict, leaderboard, export, data, config, replay, bench):
        command.add_parser(commands)
    return parser


class _Version(argparse.Action):
    """Looks the version up only when asked for."""

    def __call__(self, parser: argparse.ArgumentParser, *args: Any) -> NoReturn:
        from importlib.metadata import version

        print("molflt", version("molflt"))
        parser.exit()
