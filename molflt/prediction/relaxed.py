"""Predicted relaxed structures, a file each."""

from __future__ import annotations

import os
import re
from pathlib import Path

from ase.io.extxyz import write_xyz

from molflt.errors import InputError
from molflt.prediction.outcome import Prediction


class RelaxedFolder:
    """Writes initial positions plus predicted Δpos as extxyz files, `<row>-<name>-<frame>.extxyz`.

    Rows count the outcomes from 0, failed ones too, as in the table of predictions. Fixed atoms stay where
    they are. Energies are not in the files: the predicted one is in the table.

    Args:
        folder: made with the first file where it does not exist.

    Raises:
        InputError: the folder has content, is a file or cannot be made.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        try:
            if self.folder.is_dir() and any(self.folder.iterdir()):
                raise InputError(f"{folder} is not empty; give --write-relaxed a new folder")
        except OSError as error:
            raise self._unusable(error.strerror) from error
        above = next(path for path in (self.folder, *self.folder.parents) if os.path.lexists(path))
        if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
            raise self._unusable(f"{above} is no folder that can be written")

    def write(self, row: int, prediction: Prediction) -> Path:
        """Write one structure and return its file; `InputError` where the disk refuses."""
        name = re.sub(r"[^\w.+-]", "_", Path(prediction.source).name)[:80]
        path = self.folder / f"{row:06d}-{name}-{prediction.frame}.extxyz"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise self._unusable(error.strerror) from error
        try:
            with path.open("w", encoding="utf-8") as file:
                write_xyz(file, [prediction.relaxed_atoms()], comment="")
        except OSError as error:
            raise InputError(f"cannot write {path}: {error.strerror}; make room or choose another") from error
        return path

    def _unusable(self, reason: str | None) -> InputError:
        return InputError(f"cannot make the folder {self.folder}: {reason}; give --write-relaxed another")
