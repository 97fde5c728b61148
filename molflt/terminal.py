"""Tables on a terminal, in a pipe or in a file; and how far something long has come."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, TypeVar

from molflt.errors import InputError

if TYPE_CHECKING:
    from rich.table import Table

Item = TypeVar("Item")

SHOWN_AFTER, BAR_EVERY, LINE_EVERY = 3.0, 0.25, 60.0
"""Seconds until `tracked` shows something, and between its bars on a terminal and its lines elsewhere."""


def tracked(items: Iterable[Item], total: int, text: str) -> Iterator[Item]:
    """The items; once they take more than seconds with a bar on stderr, or a line a minute off a terminal."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    bar = Progress(console=console, auto_refresh=False)
    due = time.monotonic() + SHOWN_AFTER
    # Off a terminal it is not even begun: at its end some versions of rich write an empty line there.
    with bar if console.is_terminal else nullcontext():
        task = bar.add_task(text, total=total, visible=False)
        for number, item in enumerate(items):
            if (now := time.monotonic()) > due:
                due = now + (BAR_EVERY if console.is_terminal else LINE_EVERY)
                bar.update(task, completed=number, visible=True, refresh=True)
                if not console.is_terminal:
                    print(f"molflt: {text}: {number} of {total}", file=sys.stderr)
            yield item
        bar.update(task, completed=total, refresh=True)


def print_tables(*tables: Table) -> None:
    """Tables on stdout, with names printed as they are."""
    from rich.console import Console

    # Where no terminal sets the width (a pipe, a file), lines are as long as their content.
    width = None if sys.stdout.isatty() else 1000
    console = Console(width=width, markup=False, emoji=False, highlight=False)
    with _writing(), console.capture() as capture:
        for table in tables:
            console.print(table)
    print_text(capture.get())


def print_text(text: str) -> None:
    """Text on stdout, at once; names that its encoding does not have are shown by their codes.

    Raises:
        InputError: the disk that stdout goes to is full or fails.
    """
    encoding = sys.stdout.encoding or "utf-8"
    with _writing():
        sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding))
        sys.stdout.flush()


@contextmanager
def _writing() -> Iterator[None]:
    """Turns what the disk says into `InputError`; a reader that has gone remains a BrokenPipeError."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        # What the buffer still holds must not fail once more when Python ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise InputError(
            f"cannot write standard output: {error.strerror}; make room or send it elsewhere"
        ) from error
