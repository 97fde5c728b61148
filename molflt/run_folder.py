"""The folder that a training run writes: refused where it is in use, else made afresh.

Imports no torch, so that a refusal is instant.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from molflt.config import Config, save_config
from molflt.errors import InputError
from molflt.replacing import replacing
from molflt.run_lock import LOCK

ENTRIES = (
    "config.yaml",
    "versions.json",
    "metrics.csv",
    "loss.png",
    "checkpoints",
    "tensorboard",
    "wandb",
    "nonfinite",
)
"""What a run writes, and what a new run in the same folder replaces."""

RESUME_NEWEST, RESUME_PREVIOUS = "resume.ckpt", "resume-previous.ckpt"
"""In `checkpoints`: the state to continue from, and the one before it."""


def is_first_process() -> bool:
    """Whether this process is the one that writes, of all that a launcher, or Lightning, started."""
    numbers = (os.environ.get(name) for name in ("RANK", "LOCAL_RANK", "SLURM_PROCID", "JSM_NAMESPACE_RANK"))
    first = next((number for number in numbers if number), "0")
    # Without a launcher, the first process of each node starts the others of it.
    node = "0" if os.environ.get("RANK") else os.environ.get("NODE_RANK") or "0"
    return first == node == "0"


def has_resume_state(output: Path) -> bool:
    """Whether a run in this folder has left a state to continue from, whole or not."""
    return any((output / "checkpoints" / name).exists() for name in (RESUME_NEWEST, RESUME_PREVIOUS))


def check_run_folder(output: Path, overwrite: bool = False, resume: bool = False) -> None:
    """Raise `InputError` where a run folder can not be made or has content that is not to be replaced.

    With `resume`, a folder that is absent, is empty or holds a run that was stopped before its first step is
    as good as one with a state to continue from: the run starts in it.
    """
    choose = "choose another --training.output"
    if overwrite and resume:
        raise InputError("--overwrite discards the run that --resume continues; give one of them")
    if output.exists() and not output.is_dir():
        raise InputError(f"the run folder {output} is a file; {choose}")
    if not output.is_dir() or (resume and has_resume_state(output)):
        return
    if not any(entry.suffix != ".partial" and entry.name != LOCK for entry in output.iterdir()):
        return
    if resume:
        if (output / "config.yaml").is_file() and not any((output / "checkpoints").glob("*.ckpt")):
            return
        raise InputError(f"{output} holds no run that can be continued; {choose} or add --overwrite")
    if not overwrite:
        raise InputError(f"the run folder {output} is not empty; {choose} or add --overwrite")
    if not (output / "config.yaml").is_file():
        raise InputError(f"{output} holds other files than a run's, --overwrite leaves them; {choose}")


def prepare_run_folder(output: Path, config: Config) -> None:
    """Make the run folder, without what an earlier run left in it, and write config.yaml."""
    try:
        # config.yaml goes last: it marks the folder as a run's.
        for entry in (output / name for name in reversed(ENTRIES)):
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


def write_text(path: Path, text: str) -> None:
    """Write a file that appears whole or not at all; `InputError` where that fails."""
    try:
        with replacing(path) as partial:
            partial.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}; make room there") from error
