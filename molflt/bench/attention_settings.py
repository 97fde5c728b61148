"""What `molflt bench attention` measures, and its command-line options, made from one dataclass.

This module imports no torch, so that the command line's help is instant.
"""

from __future__ import annotations

from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from molflt.errors import InputError

Level = Literal["core", "layer"]
Mode = Literal["forward", "training"]

LEVELS: tuple[Level, ...] = ("core", "layer")
MODES: tuple[Mode, ...] = ("forward", "training")


def parse_lengths(text: str) -> tuple[int, ...]:
    """`64,256,1024` as numbers."""
    try:
        return tuple(int(word) for word in text.split(","))
    except ValueError:
        raise ArgumentTypeError(f"must be numbers with commas between, got {text!r}") from None


def _option(
    default: Any, parse: Callable[[str], Any], text: str, choices: tuple[str, ...] | None = None
) -> Any:
    return field(default=default, metadata={"type": parse, "help": text, "choices": choices})


@dataclass(frozen=True)
class AttentionBenchSettings:
    """Sizes and conditions of the comparison; each field is an option of the command.

    Raises:
        InputError: a number below its minimum, a clock that does not fit the device, or an output that is a
            file.
    """

    lengths: tuple[int, ...] = _option(
        (64, 256, 1024, 2048, 8192, 32768), parse_lengths, "numbers of tokens N, with commas between"
    )
    heads: int = _option(12, int, "attention heads H")
    head_dim: int = _option(64, int, "width D of a head; a layer has H x D channels")
    features: int = _option(64, int, "random features M, the same for all")
    frequencies: int = _option(16, int, "frequencies R of FLT's RPE")
    batch_size: int = _option(1, int, "graphs B of N tokens each")
    repeats: int = _option(7, int, "rounds, in each of which all contenders run once")
    level: Literal["core", "layer", "both"] = _option(
        "both",
        str,
        "core: q, k, v and positions in, output out; layer: input and positions in, projections included",
        (*LEVELS, "both"),
    )
    mode: Literal["forward", "training", "both"] = _option(
        "both",
        str,
        "forward: without gradients; training: forward and backward to inputs and parameters",
        (*MODES, "both"),
    )
    clock: Literal["wall", "cpu"] = _option(
        "wall",
        str,
        "wall: time passed; cpu: the process's CPU time, for a machine that has other work to do",
        ("wall", "cpu"),
    )
    threads: int | None = _option(None, int, "CPU threads; by default torch's own choice")
    device: str = _option("cpu", str, "cpu or cuda")
    memory_budget: float = _option(
        4.0, float, "GiB of tensors above which a contender of quadratic memory is not run"
    )
    seed: int = _option(0, int, "seed of the inputs and of all random weights")
    output: str = _option("runs/bench-attention", str, "folder for attention.json and attention.png")

    def __post_init__(self) -> None:
        for name in ("heads", "head_dim", "features", "frequencies", "batch_size", "repeats", "threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InputError(f"{_flag(name)} must be at least 1, got {value}")
        if not self.lengths or min(self.lengths) < 1:
            raise InputError(f"--lengths must be numbers of at least 1, got {self.lengths}")
        if len(set(self.lengths)) < len(self.lengths):
            raise InputError(f"--lengths must differ from each other, got {self.lengths}")
        if self.clock == "cpu" and not self.device.startswith("cpu"):
            raise InputError(f"--clock cpu does not see what --device {self.device} does; use --clock wall")
        if not self.memory_budget > 0:
            raise InputError(f"--memory-budget must be above 0 GiB, got {self.memory_budget}")
        if Path(self.output).exists() and not Path(self.output).is_dir():
            raise InputError(f"--output {self.output} is a file; name a folder")

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


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def add_arguments(parser: ArgumentParser) -> None:
    """Adds the command's options to `parser`."""
    for setting in fields(AttentionBenchSettings):
        default = setting.default
        shown = ",".join(map(str, default)) if isinstance(default, tuple) else default
        suffix = "" if default is None else f"; {shown}"
        choices = setting.metadata["choices"]
        parser.add_argument(
            _flag(setting.name),
            type=setting.metadata["type"],
            choices=choices,
            metavar=None if choices else setting.name.upper(),
            default=default,
            help=setting.metadata["help"] + suffix,
        )


def settings_from_arguments(arguments: Namespace) -> AttentionBenchSettings:
    """Settings from parsed options."""
    return AttentionBenchSettings(
        **{setting.name: getattr(arguments, setting.name) for setting in fields(AttentionBenchSettings)}
    )
