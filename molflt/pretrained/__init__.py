"""Checkpoints that come with molflt, by name.

Each is a file `<name>.ckpt` in this folder, with the energies it predicts for the structures of its data set
in `<name>.json`. Wherever a checkpoint is asked for, its name will do. `fcc111-flt` is made by

    molflt train configs/shipped/fcc111-flt.yaml
    molflt export runs/fcc111-shipped/checkpoints/best.ckpt molflt/pretrained/fcc111-flt.ckpt \\
        --structures datasets/fcc111/structures
"""

from __future__ import annotations

import os
from pathlib import Path

FOLDER = Path(__file__).parent


def pretrained_names() -> list[str]:
    """Names of the checkpoints shipped with this installation."""
    return sorted(path.stem for path in FOLDER.glob("*.ckpt"))


def resolve_checkpoint(name_or_path: str | os.PathLike[str]) -> Path:
    """The file of a checkpoint given by path or by the name of a shipped one; an existing file wins."""
    path = Path(name_or_path)
    if not path.exists() and str(name_or_path) in pretrained_names():
        return FOLDER / f"{name_or_path}.ckpt"
    return path
