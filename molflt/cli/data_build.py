"""`molflt data build NAME SOURCE [OUT]`."""

from __future__ import annotations

import argparse
from typing import Any

from molflt.cli.shared import OK, add_command, add_group, count, positive


def add_parser(commands: Any) -> None:
    """A data set each."""
    kinds = add_group(commands, "build", "build a shipped data set from its source", "data sets", "NAME")
    for name, run, source, output in (
        ("fcc111", _fcc111, "fcc111_adsorption.json", "datasets/fcc111"),
        ("oc20-sample", _oc20_sample, "the raw OC20 fields", "datasets/oc20_sample"),
    ):
        parser = add_command(kinds, name, run, f"build {output}")
        parser.add_argument("source", metavar="SOURCE", help=source)
        parser.add_argument("output", metavar="OUT", nargs="?", default=output, help="folder; %(default)s")

    _add_qm7(kinds)
    _add_charged_fragments(kinds)


def _add_qm7(kinds: Any) -> None:
    parser = add_command(kinds, "qm7", _qm7, "build datasets/qm7")
    parser.add_argument("source", metavar="SOURCE", help="qm7.extxyz.gz")
    parser.add_argument(
        "output", metavar="OUT", nargs="?", default="datasets/qm7", help="folder; %(default)s"
    )
    parser.add_argument(
        "--molecules", metavar="N", type=positive, help="keep a fixed random part of N molecules; all"
    )


def _add_charged_fragments(kinds: Any) -> None:
    output = "datasets/charged_fragments"
    parser = add_command(kinds, "charged-fragments", _charged_fragments, f"build {output}")
    parser.add_argument("output", metavar="OUT", nargs="?", default=output, help="folder; %(default)s")
    parser.add_argument("--seed", type=count, default=0, help="of the arrangements; %(default)s")


def _fcc111(arguments: argparse.Namespace) -> int:
    from molflt.data.fcc111 import build_fcc111

    build_fcc111(arguments.source, arguments.output)
    return OK


def _oc20_sample(arguments: argparse.Namespace) -> int:
    from molflt.data.oc20_sample import build_oc20_sample

    build_oc20_sample(arguments.source, arguments.output)
    return OK


def _qm7(arguments: argparse.Namespace) -> int:
    from molflt.data.qm7 import build_qm7

    build_qm7(arguments.source, arguments.output, arguments.molecules)
    return OK


def _charged_fragments(arguments: argparse.Namespace) -> int:
    from molflt.data.charged_fragments import build_charged_fragments

    build_charged_fragments(arguments.output, arguments.seed)
    return OK
