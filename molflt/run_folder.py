"""The folder that a training run writes: refused where it is in use, else made afresh.

Imports no torch, so that a refusal is instant.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from molflt.config import Config, save_config
from molflt.errors import InputError

ENTRIES = ("config.yaml", "metrics.csv", "checkpoints", "tensorboard")
"""What a run writes, and what a new run in the same folder replaces."""


def check_run_folder(output: Path, overwrite: bool) -> None:
    """Raise `InputError` where a run folder can not be made or has content that is not to be replaced."""
    choose = "choose another --training.output"
    if output.exists() and not output.is_dir():
        raise InputError(f"the run folder {output} is a file; {choose}")
    if not output.is_dir() or not any(output.iterdir()):
        return
    if not overwrite:
        raise InputError(f"the run folder {output} is not empty; {choose} or add --overwrite")
    if not (output / "config.yaml").is_file():
        raise InputError(f"{output} holds other files than a run's, --overwrite leaves them; {choose}")


def prepare_run_folder(output: Path, config: Config) -> None:
    """Make the run folder, without what an earlier run left in it, and write config.yaml."""
    try:
        for entry in (output / name for name in ENTRIES):
            if entry.is_dir():
                shutil.rmtree(entry)
            else:
                entry.unlink(missing_ok=True)
        output.mkdir(parents=True, exist_ok=True)
        save_config(config, output / "config.yaml")
    except OSError as error:
        raise InputError(
            f"cannot write the run folder {output}: {error.strerror}; choose another --training.output"
        ) from error
