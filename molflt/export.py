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
from molflt.errors import InputError
from molflt.prediction import Prediction, Predictor, expand_paths, iter_inputs

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

    Args:
        source: a checkpoint with its training domain, as a finished run has it.
        target: the file to write, `NAME.ckpt`, in a folder that exists.
        structures: files and folders whose energies go into `NAME.json`, by file name and frame.

    Raises:
        InputError: a file can not be read or written, or the checkpoint does not say what it was trained on.
    """
    target = Path(target)
    if target.suffix != ".ckpt" or not target.parent.is_dir():
        raise InputError(f"cannot write {target}; give a name that ends in .ckpt, in a folder that exists")
    checkpoint = load_checkpoint(source)
    if not checkpoint.metadata.domain:
        raise InputError(f"{source} has no training domain; export the checkpoint of a finished run")
    config = checkpoint.config
    # The folder that a run was in is nobody else's business.
    config = replace(config, training=replace(config.training, output=f"runs/{target.stem}"))
    checkpoint = Checkpoint(config, checkpoint.model.to(torch.float32), checkpoint.metadata)
    predictor = Predictor(checkpoint)
    energies = {_name(row): round(row.energy, 6) for row in _predictions(predictor, structures)}
    try:
        save_checkpoint(target, checkpoint)
        expected = None
        if energies:
            expected = target.with_suffix(".json")
            content = {
                "energy_meaning": predictor.energy_meaning,
                "domain": predictor.domain,
                "tolerance_eV": TOLERANCE,
                "energies_eV": energies,
            }
            expected.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise InputError(
            f"cannot write {target}: {error.strerror}; make room or give another file"
        ) from error
    return Export(
        checkpoint=target,
        num_bytes=target.stat().st_size,
        num_parameters=sum(parameter.numel() for parameter in checkpoint.model.parameters()),
        expected=expected,
        domain=predictor.domain,
    )


def _predictions(predictor: Predictor, structures: Iterable[str]) -> Iterable[Prediction]:
    for outcome in predictor.iter_predict(iter_inputs(expand_paths(structures), predictor.radius)):
        if isinstance(outcome, InputError):
            raise outcome
        yield outcome


def _name(prediction: Prediction) -> str:
    return f"{Path(prediction.source).name}:{prediction.frame}"
