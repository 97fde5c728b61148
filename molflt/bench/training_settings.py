"""What `molflt bench training` measures, and its command-line options, made from one dataclass.

This module imports no torch, so that the command line's help is instant.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from molflt.bench.options import CLOCK, check_numbers, check_output, option

Clock = Literal["wall", "cpu"]

_CLOCK = f"{CLOCK}; systems/s and wait are by the wall clock in any case"


@dataclass(frozen=True)
class TrainingBenchSettings:
    """Sizes and conditions; each field is an option of the command.

    Raises:
        InputError: a number below its minimum, or an output that is a file.
    """

    config: str = option(
        "configs/fcc111/flt.yaml", str, "YAML file with the model and its training, as for molflt train"
    )
    oc20: str = option(
        "datasets/oc20_sample",
        str,
        "OC20-format LMDB whose systems make the large batches; they are read again for each batch",
    )
    oc20_batch_size: int = option(8, int, "systems per batch of the large systems")
    steps: int = option(40, int, "training steps that are timed")
    warmup: int = option(5, int, "training steps before them")
    workers: int = option(1, int, "data-loader worker processes")
    clock: Literal["wall", "cpu"] = option("wall", str, _CLOCK, ("wall", "cpu"))
    threads: int | None = option(None, int, "CPU threads; by default torch's own choice")
    output: str = option("runs/bench-training", str, "folder for training.json")

    def __post_init__(self) -> None:
        check_numbers(self, {"oc20_batch_size": 1, "steps": 2, "warmup": 1, "workers": 0, "threads": 1})
        check_output(self.output)
