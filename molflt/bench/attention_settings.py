"""What `molflt bench attention` measures, and its command-line options, made from one dataclass.

This module imports no torch, so that the command line's help is instant.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from molflt.bench.options import CLOCK, check_numbers, check_output, option, parse_lengths
from molflt.errors import InputError

Level = Literal["core", "layer"]
Mode = Literal["forward", "training"]

LEVELS: tuple[Level, ...] = ("core", "layer")
MODES: tuple[Mode, ...] = ("forward", "training")


@dataclass(frozen=True)
class AttentionBenchSettings:
    """Sizes and conditions of the comparison; each field is an option of the command.

    Raises:
        InputError: a number below its minimum, a clock that does not fit the device, or an output that is a
            file.
    """

    lengths: tuple[int, ...] = option(
        (64, 256, 1024, 2048, 8192, 32768), parse_lengths, "numbers of tokens N, with commas between"
    )
    heads: int = option(12, int, "attention heads H")
    head_dim: int = option(64, int, "width D of a head; a layer has H x D channels")
    features: int = option(64, int, "random features M, the same for all")
    frequencies: int = option(16, int, "frequencies R of FLT's RPE")
    batch_size: int = option(1, int, "graphs B of N tokens each")
    repeats: int = option(7, int, "rounds, in each of which all contenders run once")
    level: Literal["core", "layer", "both"] = option(
        "both",
        str,
        "core: q, k, v and positions in, output out; layer: input and positions in, projections included",
        (*LEVELS, "both"),
    )
    mode: Literal["forward", "training", "both"] = option(
        "both",
        str,
        "forward: without gradients; training: forward and backward to inputs and parameters",
        (*MODES, "both"),
    )
    clock: Literal["wall", "cpu"] = option(
        "wall",
        str,
        CLOCK,
        ("wall", "cpu"),
    )
    threads: int | None = option(None, int, "CPU threads; by default torch's own choice")
    freed_memory: Literal["kept", "returned"] = option(
        "kept",
        str,
        "kept: what CPU tensors free stays with the process, as on a GPU (where the C library is glibc); "
        "returned: it goes back to the system, and page faults are part of the time",
        ("kept", "returned"),
    )
    device: str = option("cpu", str, "cpu or cuda")
    memory_budget: float = option(
        4.0, float, "GiB of tensors above which a contender of quadratic memory is not run"
    )
    seed: int = option(0, int, "seed of the inputs and of all random weights")
    output: str = option("runs/bench-attention", str, "folder for attention.json and attention.png")

    def __post_init__(self) -> None:
        counts = ("heads", "head_dim", "features", "frequencies", "batch_size", "repeats", "threads")
        check_numbers(self, dict.fromkeys(counts, 1))
        lengths = ",".join(map(str, self.lengths))
        if not self.lengths or min(self.lengths) < 1:
            raise InputError(f"--lengths must be numbers of at least 1, got {lengths or 'none'}")
        if len(set(self.lengths)) < len(self.lengths):
            raise InputError(f"--lengths must differ from each other, got {lengths}")
        if self.clock == "cpu" and not self.device.startswith("cpu"):
            raise InputError(f"--clock cpu does not see what --device {self.device} does; use --clock wall")
        if not self.memory_budget > 0:
            raise InputError(f"--memory-budget must be above 0 GiB, got {self.memory_budget}")
        check_output(self.output)

    @property
    def channels(self) -> int:
        """Width of a layer."""
        return self.heads * self.head_dim

    @property
    def levels(self) -> tuple[Level, ...]:
        """The levels to measure."""
        return LEVELS if self.level == "both" else (self.level,)

    @property
    def modes(self) -> tuple[Mode, ...]:
        """The modes to measure."""
        return MODES if self.mode == "both" else (self.mode,)
