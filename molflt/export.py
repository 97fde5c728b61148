"""A checkpoint to give away: the weights and what they were trained on, and nothing of the training itself.

Beside `NAME.ckpt` goes `NAME.json` with the energies that it predicts for some structures, so that whoever
has both can see whether an installation predicts the same.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from molflt.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from molflt.config import Config
from molflt.errors import InputError
from molflt.prediction import Prediction, Predictor, expand_paths, iter_inputs
from molflt.run_folder import write_text

TOLERANCE = 1e-4
"""eV; what machines and versions of torch may differ by."""


@dataclass(frozen=True)
class Export:
    """What was written."""

    checkpoint: Path
    num_bytes: int
    num_parameters: int
    expected: Path | None
    """The energies; None where no structures were given."""
    domain: str
    """What the checkpoint says about its training data."""


def export_checkpoint(
    source: str | os.PathLike[str], target: str | os.PathLike[str], structures: Iterable[str] = ()
) -> Export:
    """Write the weights of a run's checkpoint in float32 with their description to `target`.

    Of the paths in its configuration only a data folder below the working folder stays; of another its last
    name.

    Args:
        source: a checkpoint with its training domain, as a finished run has it.
        target: the file to write, `NAME.ckpt`, in a folder that exists.
        structures: files and folders whose energies go into `NAME.json`, by file name and frame; where
            names are equal, by as much of the path as tells them apart.

    Raises:
        InputError: a file can not be read or written, or would be replaced though it is read; or the
            checkpoint does not say what it was trained on.
    """
    target = Path(target)
    if target.suffix != ".ckpt" or not target.parent.is_dir():
        raise InputError(f"cannot write {target}; give a name that ends in .ckpt, in a folder that exists")
    structures = list(structures)
    expected = target.with_suffix(".json")
    for name in (source, *structures):
        if os.path.realpath(name) in (os.path.realpath(target), os.path.realpath(expected)):
            raise InputError(f"{name} would be replaced by the export; give another name to write")
    checkpoint = load_checkpoint(source)
    if not checkpoint.metadata.domain:
        raise InputError(f"{source} has no training domain; export the checkpoint of a finished run")
    config = without_paths(checkpoint.config, target.stem)
    checkpoint = Checkpoint(config, checkpoint.model.to(torch.float32), checkpoint.metadata)
    predictor = Predictor(checkpoint)
    rows = list(_predictions(predictor, structures))
    names = distinct_names(row.source for row in rows)
    energies = {f"{names[row.source]}:{row.frame}": round(row.energy, 6) for row in rows}
    save_checkpoint(target, checkpoint)
    if energies:
        content = {
            "energy_meaning": predictor.energy_meaning,
            "domain": predictor.domain,
            "tolerance_eV": TOLERANCE,
            "energies_eV": energies,
        }
        write_text(expected, json.dumps(content, indent=1, ensure_ascii=False) + "\n")
    return Export(
        checkpoint=target,
        num_bytes=target.stat().st_size,
        num_parameters=sum(parameter.numel() for parameter in checkpoint.model.parameters()),
        expected=expected if energies else None,
        domain=predictor.domain,
    )


def without_paths(config: Config, name: str) -> Config:
    """The configuration without what folders and files were called where it was trained."""
    root = Path(config.data.root)
    if root.is_absolute() or ".." in root.parts:
        root = Path(root.name or "data")
    training = replace(config.training, output=f"runs/{name}", init_from=None, init_skip=[], wandb=None)
    return replace(config, data=replace(config.data, root=root.as_posix()), training=training)


def distinct_names(sources: Iterable[str]) -> dict[str, str]:
    """A name for each file: its own, or where several share that, the path below the folder they share."""
    places: dict[str, dict[str, str]] = {}
    for source in sources:
        places.setdefault(Path(source).name, {})[source] = os.path.abspath(source)
    names = {}
    for name, found in places.items():
        shared = os.path.commonpath(map(os.path.dirname, found.values()))
        for source, place in found.items():
            names[source] = name if len({*found.values()}) == 1 else os.path.relpath(place, shared)
    return names


def _predictions(predictor: Predictor, structures: Iterable[str]) -> Iterable[Prediction]:
    for outcome in predictor.iter_predict(iter_inputs(expand_paths(structures), predictor.radius)):
        if isinstance(outcome, InputError):
            raise outcome
        yield outcome
