"""One HTML file that shows an evaluation: scores, parity, errors, and the worst systems in three dimensions.

The page is complete in itself: it loads nothing, so it can be mailed, archived and opened offline. Its
program is `report.html` beside this module; here its data are put in.
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import torch
from ase.data import chemical_symbols, covalent_radii
from ase.data.colors import jmol_colors

from molflt.data.datasets import OC20IS2RE
from molflt.evaluation.evaluate import Evaluation
from molflt.evaluation.tabulation import scores_json, write_whole

TEMPLATE = Path(__file__).with_name("report.html")
PLACE = "/*EVALUATION*/null"
NUM_WORST = 20


def write_report(path: str | os.PathLike[str], evaluation: Evaluation) -> None:
    """Write the report; the file appears whole or not at all. Needs `evaluation.systems`."""
    page = render_report(evaluation)
    write_whole(path, lambda file: file.write(page))


def render_report(evaluation: Evaluation) -> str:
    """The report's HTML."""
    data = json.dumps(report_data(evaluation), allow_nan=False, separators=(",", ":"))
    # Nothing in a name may end the script element or begin a comment in it.
    data = data.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
    return TEMPLATE.read_text(encoding="utf-8").replace(PLACE, data)


def report_data(evaluation: Evaluation) -> dict[str, Any]:
    """What the page shows."""
    return {
        "root": evaluation.root,
        "meaning": evaluation.energy_meaning,
        "threshold": evaluation.threshold,
        "scores": scores_json(evaluation.scores),
        "breakdown": scores_json(evaluation.breakdown),
        "splits": [
            {
                "name": split,
                "sid": predictions.sid.tolist(),
                "target": _rounded(predictions.target),
                "energy": _rounded(predictions.energy),
                "size": [system.num_atoms for system in evaluation.systems[split]],
            }
            for split, predictions in evaluation.predictions.items()
        ],
        "worst": [_worst_system(evaluation, split, row) for split, row in worst_rows(evaluation)],
    }


def worst_rows(evaluation: Evaluation) -> list[tuple[str, int]]:
    """Split and row of the systems with the largest errors over all splits, the worst first."""
    errors = [
        (-abs(float(error)), split, row)
        for split, predictions in evaluation.predictions.items()
        for row, error in enumerate((predictions.energy.double() - predictions.target.double()).tolist())
    ]
    return [(split, row) for _, split, row in sorted(errors)[:NUM_WORST]]


def _worst_system(evaluation: Evaluation, split: str, row: int) -> dict[str, Any]:
    predictions, system = evaluation.predictions[split], evaluation.systems[split][row]
    data = OC20IS2RE(evaluation.root, split).get(row)
    numbers = data.atomic_numbers.tolist()
    tags, cell = data.get("tags"), data.get("cell")
    vectors = [[0.0] * 3] * 3 if cell is None else cell.reshape(3, 3).tolist()
    return {
        "split": split,
        "sid": system.sid,
        "formula": system.formula,
        "adsorbate": system.adsorbate,
        "target": float(predictions.target[row]),
        "energy": float(predictions.energy[row]),
        "symbols": [chemical_symbols[z] for z in numbers],
        "positions": [[round(x, 3) for x in point] for point in data["pos"].tolist()],
        "radii": [round(float(covalent_radii[z]), 2) for z in numbers],
        "colors": ["#" + "".join(f"{round(255 * c):02x}" for c in jmol_colors[z]) for z in numbers],
        "tags": [0] * len(numbers) if tags is None else tags.tolist(),
        "cell": [[round(x, 3) for x in vector] for vector in vectors],
    }


def _rounded(values: torch.Tensor) -> list[float | None]:
    """To 0.1 meV, which no plot resolves."""
    return [round(value, 4) if math.isfinite(value) else None for value in values.double().tolist()]
