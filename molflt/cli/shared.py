"""What the commands have in common: exit statuses, error lines, number types, printing of tables."""

from __future__ import annotations

import argparse
import difflib
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from molflt.errors import InputError, InputWarning

OK, SOME_FAILED, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130


class Parser(argparse.ArgumentParser):
    """Reports a wrong argument as `InputError`, hence in one line; so do the parsers of its subcommands.

    Words that a parser does not know it refuses itself, so that the line is about the subcommand's own
    options. One whose default `takes_settings` is true, or which has such a subcommand, hands on options.
    """

    def parse_known_args(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        namespace, unknown = super().parse_known_args(args, namespace)
        if unknown and not (getattr(namespace, "takes_settings", False) and unknown[0].startswith("--")):
            self._refuse(unknown[0])
        return namespace, unknown

    def _refuse(self, word: str) -> NoReturn:
        if os.path.lexists(word) and word.startswith("-"):
            self.error(f"unknown argument {word} (the name of a file needs ./ before it)")
        options = [name for name in self._option_string_actions if name.startswith("--")]
        nearest = difflib.get_close_matches(word.partition("=")[0], options, 1) if word[:2] == "--" else []
        self.error(f"unknown argument {word}" + "".join(f"; the nearest valid one is {n}" for n in nearest))

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message}; see {self.prog} --help")


def add_command(
    commands: Any, name: str, run: Callable[[argparse.Namespace], int], text: str
) -> argparse.ArgumentParser:
    """Add a subcommand that `run(namespace)` carries out, returning its exit status.

    Args:
        commands: what `add_subparsers` returned.
        name: of the subcommand.
        run: imports what it needs itself, so that help stays instant.
        text: what the subcommand does, without capital and full stop.
    """
    parser = commands.add_parser(
        name, help=text, description=text[0].upper() + text[1:] + ".", allow_abbrev=False
    )
    parser.set_defaults(run=run)
    return parser


def add_group(commands: Any, name: str, text: str, title: str = "commands", metavar: str = "COMMAND") -> Any:
    """Add a subcommand that only holds further ones; what is returned takes them, as in `add_command`."""
    group = commands.add_parser(name, help=text, allow_abbrev=False)
    return group.add_subparsers(title=title, metavar=metavar, required=True)


def positive(text: str) -> int:
    """Argument type: an integer of at least 1."""
    return _at_least(1, int(text))


def seeds(text: str) -> list[int]:
    """Argument type: different numbers of at least 0, with commas between."""
    words = text.split(",")
    numbers = [int(word) for word in words if word.strip().isdecimal() and int(word) < 2**32]
    if len({*numbers}) < len(words):
        raise argparse.ArgumentTypeError(
            f"must be different numbers with commas between, from 0 to 2**32 - 1, got {text!r}"
        )
    return numbers


def count(text: str) -> int:
    """Argument type: an integer of at least 0."""
    return _at_least(0, int(text))


def positive_number(text: str) -> float:
    """Argument type: a finite number above 0."""
    number = float(text)
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"must be above 0 and finite, got {text}")
    return number


def add_device(parser: argparse.ArgumentParser) -> None:
    """Add `--device`, to be checked by `usable_device`."""
    parser.add_argument("--device", metavar="NAME", default="cpu", help="cpu, cuda or cuda:N; %(default)s")


def usable_device(name: str) -> str:
    """The name of a device on which torch can compute; `InputError` for another."""
    import torch

    try:
        if torch.device(name).type not in ("cpu", "cuda"):
            raise RuntimeError
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        raise InputError(
            f"--device {name} cannot be used; give cpu, or cuda where torch finds one"
        ) from error
    return name


def check_output_file(path: str, suffix: str, inputs: Iterable[str | os.PathLike[str]]) -> None:
    """Raise `InputError` unless `path` can be written, ends in `suffix` and is none of the files read."""
    target = Path(path)
    if target.is_dir() or not target.parent.is_dir():
        raise InputError(f"cannot write {path}; give a file name in a folder that exists")
    if target.suffix != suffix:
        raise InputError(f"cannot write {path}; give a name that ends in {suffix}")
    if any(os.path.realpath(item) == os.path.realpath(target) for item in inputs):
        raise InputError(f"{path} is an input of the command; give another file to write")


def print_error(error: Exception) -> None:
    """One line on stderr."""
    print("molflt: error:", " ".join(str(error).split()), file=sys.stderr)


def print_note(text: str) -> None:
    """One line on stderr that is no error."""
    print("molflt:", " ".join(text.split()), file=sys.stderr)


@contextmanager
def one_line_warnings() -> Iterator[None]:
    """Show each `InputWarning` as one line on stderr, without its place in the source."""
    shown = warnings.showwarning

    def show(message: Warning | str, category: type[Warning], *place: Any, **file: Any) -> None:
        if issubclass(category, InputWarning):
            print("molflt: warning:", " ".join(str(message).split()), file=sys.stderr)
        else:
            shown(message, category, *place, **file)

    with warnings.catch_warnings():
        warnings.simplefilter("always", InputWarning)
        warnings.showwarning = show
        yield


def _at_least(least: int, number: int) -> int:
    if number < least:
        raise argparse.ArgumentTypeError(f"must be at least {least}, got {number}")
    return number
