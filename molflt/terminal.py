"""Tables on a terminal, in a pipe or in a file."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table


def print_tables(*tables: Table) -> None:
    """Tables on stdout, with names printed as they are."""
    from rich.console import Console

    # Where no terminal sets the width (a pipe, a file), lines are as long as their content.
    width = None if sys.stdout.isatty() else 1000
    console = Console(width=width, markup=False, emoji=False, highlight=False)
    with console.capture() as capture:
        for table in tables:
            console.print(table)
    # Names that are no UTF-8, and a terminal that is not: shown by their codes instead of failing.
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(capture.get().encode(encoding, "backslashreplace").decode(encoding))
