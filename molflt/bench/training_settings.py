"""What `molflt bench training` measures, and its command-line options.

This module imports no torch, so that the command line's help is instant.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

from molflt.errors import InputError

Clock = Literal["wall", "cpu"]

_HELP = {
    "config": "YAML file with the model and its training, as for molflt train",
    "oc20": "OC20-format LMDB whose systems make the large batches; they are read again for each batch",
    "oc20_batch_size": "systems per batch of the large systems",
    "steps": "training steps that are timed",
    "warmup": "training steps before them",
    "workers": "data-loader worker processes",
    "clock": "wall: time passed; cpu: the process's CPU time, for a machine that has other work to do; "
    "systems/s and wait are by the wall clock in any case",
    "threads": "CPU threads; by default torch's own choice",
    "output": "folder for training.json",
}


@dataclass(frozen=True)
class TrainingBenchSettings:
    """Sizes and conditions; each field is an option of the command.

    Raises:
        InputError: a number below its minimum, or an output that is a file.
    """

    config: str = "configs/fcc111/flt.yaml"
    oc20: str = "datasets/oc20_sample"
    oc20_batch_size: int = 8
    steps: int = 40
    warmup: int = 5
    workers: int = 1
    clock: Clock = "wall"
    threads: int | None = None
    output: str = "runs/bench-training"

    def __post_init__(self) -> None:
        for name, least in (
            ("oc20_batch_size", 1),
            ("steps", 2),
            ("warmup", 1),
            ("workers", 0),
            ("threads", 1),
        ):
            value = getattr(self, name)
            if value is not None and value < least:
                raise InputError(f"{_flag(name)} must be at least {least}, got {value}")
        if Path(self.output).exists() and not Path(self.output).is_dir():
            raise InputError(f"--output {self.output} is a file; name a folder")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def add_arguments(parser: ArgumentParser) -> None:
    """Adds the command's options to `parser`."""
    for setting in fields(TrainingBenchSettings):
        is_text = isinstance(setting.default, str)
        parser.add_argument(
            _flag(setting.name),
            type=str if is_text else int,
            choices=("wall", "cpu") if setting.name == "clock" else None,
            metavar=None if setting.name == "clock" else setting.name.upper(),
            default=setting.default,
            help=_HELP[setting.name] + ("" if setting.default is None else f"; {setting.default}"),
        )


def settings_from_arguments(arguments: Namespace) -> TrainingBenchSettings:
    """Settings from parsed options."""
    return TrainingBenchSettings(
        **{setting.name: getattr(arguments, setting.name) for setting in fields(TrainingBenchSettings)}
    )
