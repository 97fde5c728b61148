"""`molflt data build NAME SOURCE [OUT]`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from molflt.cli.shared import OK, add_command, add_group, count, positive
from molflt.terminal import print_text

_FOLDER = "folder, in which the set's files are replaced; %(default)s"


def add_parser(commands: Any) -> None:
    """A data set each."""
    kinds = add_group(commands, "build", "build a shipped data set from its source", "data sets", "NAME")
    for name, run, source, output in (
        ("fcc111", _fcc111, "fcc111_adsorption.json", "datasets/fcc111"),
        ("oc20-sample", _oc20_sample, "the raw OC20 fields", "datasets/oc20_sample"),
    ):
        parser = add_command(kinds, name, run, f"build {output}")
        parser.add_argument("source", metavar="SOURCE", help=source)
        parser.add_argument("output", metavar="OUT", nargs="?", default=output, help=_FOLDER)

    _add_qm7(kinds)
    _add_charged_fragments(kinds)


def _add_qm7(kinds: Any) -> None:
    parser = add_command(kinds, "qm7", _qm7, "build datasets/qm7")
    parser.add_argument("source", metavar="SOURCE", help="qm7.extxyz.gz")
    parser.add_argument("output", metavar="OUT", nargs="?", default="datasets/qm7", help=_FOLDER)
    parser.add_argument(
        "--molecules", metavar="N", type=positive, help="keep a fixed random part of N molecules; all"
    )


def _add_charged_fragments(kinds: Any) -> None:
    output = "datasets/charged_fragments"
    parser = add_command(kinds, "charged-fragments", _charged_fragments, f"build {output}")
    parser.add_argument("output", metavar="OUT", nargs="?", default=output, help=_FOLDER)
    parser.add_argument("--seed", type=count, default=0, help="of the arrangements; %(default)s")


def _fcc111(arguments: argparse.Namespace) -> int:
    from molflt.data.fcc111 import build_fcc111

    return _told(build_fcc111(arguments.source, arguments.output))


def _oc20_sample(arguments: argparse.Namespace) -> int:
    from molflt.data.oc20_sample import build_oc20_sample

    return _told(build_oc20_sample(arguments.source, arguments.output))


def _qm7(arguments: argparse.Namespace) -> int:
    from molflt.data.qm7 import build_qm7

    return _told(build_qm7(arguments.source, arguments.output, arguments.molecules))


def _charged_fragments(arguments: argparse.Namespace) -> int:
    from molflt.data.charged_fragments import build_charged_fragments

    return _told(build_charged_fragments(arguments.output, arguments.seed))


def _told(folder: Path) -> int:
    """Say what has been built."""
    from molflt.data.lmdb import RecordReader

    for path in sorted(folder.rglob("*.lmdb")):
        print_text(f"{path}: {len(RecordReader(path))} systems\n")
    return OK
