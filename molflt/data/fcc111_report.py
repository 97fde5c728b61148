"""Writes `SPLITS.md` of `datasets/fcc111`: what each split holds and how far the atoms move."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from molflt.data.fcc111 import System

_PERCENTILES = (50, 90, 99, 100)


def write_split_report(
    path: Path, splits: Mapping[str, Sequence[System]], left_out: Sequence[tuple[System, str]]
) -> None:
    """Write the report.

    Args:
        path: the Markdown file.
        splits: split name to its systems.
        left_out: systems left out, each with the reason.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        "\n".join([*_counts(splits), *_displacements(splits), *_left_out(left_out), ""]), encoding="utf-8"
    )


def _counts(splits: Mapping[str, Sequence[System]]) -> list[str]:
    lines = [
        "# Splits of fcc111",
        "",
        "Written by `molflt data build fcc111`. No (metal, adsorbate, site) triple is in two splits:",
        "`val_id` holds out whole triples with all their coverages, `val_ood_ads` an adsorbate,",
        "`val_ood_cat` a metal, `val_ood_both` both.",
        "",
        "| split | systems | triples | metals | adsorbates | energy mean ± std, eV | min to max, eV |",
        "| --- | ---: | ---: | --- | --- | ---: | ---: |",
    ]
    for split, systems in splits.items():
        energies = np.array([system.energy for system in systems])
        lines.append(
            f"| {split} | {len(systems)} | {len({s.triple for s in systems})} "
            f"| {_names(s.metal for s in systems)} | {_names(s.adsorbate for s in systems)} "
            f"| {energies.mean():.2f} ± {energies.std():.2f} | {energies.min():.2f} to {energies.max():.2f} |"
        )
    return [*lines, f"| all | {sum(map(len, splits.values()))} | {len(_all_triples(splits))} | | | | |", ""]


def _displacements(splits: Mapping[str, Sequence[System]]) -> list[str]:
    systems = [system for members in splits.values() for system in members]
    tags = np.concatenate([system.initial.get_tags() for system in systems])
    moved = np.concatenate([system.delta_pos for system in systems])
    fixed = np.concatenate(
        [np.isin(np.arange(len(s.initial)), s.initial.constraints[0].index) for s in systems]
    )
    groups = {
        "fixed (two bottom layers)": fixed,
        "third layer": (tags == 0) & ~fixed,
        "surface layer": tags == 1,
        "adsorbates": tags == 2,
    }
    lines = [
        "## How far atoms move",
        "",
        "Length of the minimum-image Δpos, relaxed - initial, over the systems kept, in Å; the last column",
        "is its sideways part. Adsorbates moved along the surface normal only; none left its labelled site.",
        "",
        "| atoms | number | " + " | ".join(f"{p} %" for p in _PERCENTILES) + " | largest sideways |",
        "| --- | ---: |" + " ---: |" * (len(_PERCENTILES) + 1),
    ]
    for name, rows in groups.items():
        lengths = np.linalg.norm(moved[rows], axis=1)
        sideways = np.linalg.norm(moved[rows][:, :2], axis=1)
        quantiles = " | ".join(f"{value:.3f}" for value in np.percentile(lengths, _PERCENTILES))
        lines.append(f"| {name} | {rows.sum()} | {quantiles} | {sideways.max():.3f} |")
    return [*lines, ""]


def _left_out(left_out: Sequence[tuple[System, str]]) -> list[str]:
    lines = [
        "## Records left out",
        "",
        "An atom that moved by more than half a neighbour distance may be nearer to another site than to its",
        "own, so the ideal structure is not shown to be where its relaxation began.",
        "",
        "| record | sid | reason |",
        "| --- | ---: | --- |",
    ]
    return [*lines, *(f"| {system.name} | {system.sid} | {reason} |" for system, reason in left_out)]


def _names(names: Iterable[str]) -> str:
    return " ".join(sorted(set(names)))


def _all_triples(splits: Mapping[str, Sequence[System]]) -> set[tuple[str, str, str]]:
    return {system.triple for systems in splits.values() for system in systems}
