"""Output that cannot be written is one line, whatever Python does with its buffers at the end."""

import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from molflt import terminal

FCC111 = Path(__file__).parents[1] / "configs" / "fcc111"
SCRIPT = """
import sys
from rich.table import Table
from molflt import cli, terminal
if sys.argv[1] == "table":
    cli.run = lambda words: terminal.print_tables(Table("name"))
sys.exit(cli.main(sys.argv[1:]))
"""


@pytest.mark.parametrize("words", [["table"], ["config", "show", str(next(FCC111.glob("*.yaml")))]])
def test_a_full_disk_is_one_line_and_status_2(words):
    """A table and a text, on the device that is always full."""
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, *words],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=600,
        )
    assert done.stderr.splitlines() == [
        "molflt: error: cannot write standard output: No space left on device; make room or send it elsewhere"
    ]
    assert done.returncode == 2


@pytest.mark.parametrize(("is_terminal", "shown"), [(False, "molflt: Reading: 1 of 3\n"), (True, "Reading")])
def test_what_takes_long_shows_how_far_it_has_come(monkeypatch, capsys, is_terminal, shown):
    """A bar on a terminal, else a line a minute; nothing where it is done before."""
    times = iter([0.0, 1.0, 61.0, 61.1])
    monkeypatch.setattr(terminal.time, "monotonic", lambda: next(times))
    monkeypatch.setattr(Console, "is_terminal", is_terminal)
    items = terminal.tracked("abc", 3, "Reading")
    assert next(items) == "a"
    assert "Reading" not in capsys.readouterr().err
    assert list(items) == ["b", "c"]
    err = capsys.readouterr().err
    assert shown in err
    assert err.count("Reading") == 1 or is_terminal
