"""Scores and predictions as plain data: JSON and CSV."""

from __future__ import annotations

import csv
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from molflt.errors import InputError
from molflt.evaluation.evaluate import Evaluation
from molflt.evaluation.scores import SplitScore
from molflt.replacing import replacing


def scores_json(scores: Sequence[SplitScore]) -> list[dict[str, Any]]:
    """Scores as JSON's own types; what is not defined (NaN) is null."""
    return [_plain(asdict(row)) for row in scores]


def prediction_rows(evaluation: Evaluation) -> Iterator[dict[str, Any]]:
    """A row per system: what it is, target, energy, error, eV, and with several checkpoints each one's energy
    and their standard deviation."""
    for split, predictions in evaluation.predictions.items():
        members = evaluation.members[split]
        for index, system in enumerate(evaluation.systems[split]):
            target, energy = float(predictions.target[index]), float(predictions.energy[index])
            row: dict[str, Any] = {
                "split": split,
                "sid": int(predictions.sid[index]),
                "formula": system.formula,
                "n_atoms": system.num_atoms,
                "adsorbate": system.adsorbate,
                "metal": system.metal,
                "target": target,
                "energy": energy,
                "error": energy - target,
            }
            if len(members) > 1:
                own = [float(member.energy[index]) for member in members]
                mean = sum(own) / len(own)
                row["std"] = math.sqrt(sum((value - mean) ** 2 for value in own) / (len(own) - 1))
                row |= {f"energy_{number}": value for number, value in enumerate(own)}
            yield row


def write_csv(path: str | os.PathLike[str], evaluation: Evaluation) -> None:
    """Write `prediction_rows`; the file appears whole or not at all. Needs `evaluation.systems`."""
    rows = list(prediction_rows(evaluation))
    write_whole(path, lambda file: _write_rows(file, rows))


def write_whole(path: str | os.PathLike[str], write: Any) -> None:
    """Call `write(text file)` for a neighbour of `path` that then takes its name; `InputError` on failure."""
    try:
        with replacing(path) as partial, partial.open("w", encoding="utf-8", newline="") as file:
            write(file)
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}; give another file") from error


def _write_rows(file: Any, rows: Sequence[dict[str, Any]]) -> None:
    writer = csv.DictWriter(file, list(rows[0]) if rows else ["split"], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
