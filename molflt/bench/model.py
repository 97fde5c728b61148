"""`molflt bench model`: what a training step of the whole model costs as one crystal grows.

A step is forward and backward to all parameters, on copper, periodic in three dimensions, its atoms moved at
random by about 0.1 Å. The radius graph is made beforehand. Time is CPU time of the best of the repeats,
summed over threads: what other programs on the machine do hardly touches it.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import torch
from ase.build import bulk
from torch_geometric.data import Data

from molflt.bench.measure import growth_exponent, peak_memory
from molflt.build import build_transform
from molflt.checkpoint import model_from_config
from molflt.config import Config, load_config
from molflt.errors import InputError
from molflt.terminal import print_tables, print_text

if TYPE_CHECKING:
    from rich.table import Table

LATTICE_CONSTANT = 3.61
"""Å, of copper."""
RATTLE = 0.1
"""Å, standard deviation of a coordinate."""
GIB = 2**30


@dataclass(frozen=True)
class ModelStep:
    """A training step on one crystal."""

    num_atoms: int
    num_edges: int
    seconds: float
    """CPU time of the best repeat."""
    peak_bytes: int
    """Largest number of bytes in tensors at one time, without parameters and structure."""


@dataclass(frozen=True)
class ModelBench:
    """All steps, and how their cost grows with the atoms: 1 is linear."""

    steps: tuple[ModelStep, ...]
    time_exponent: float
    memory_exponent: float


def crystal(num_atoms: int, seed: int = 0) -> Data:
    """Copper of `num_atoms` (a multiple of 4) in a box of cubic cells, as near to a cube as it divides.

    Raises:
        InputError: `num_atoms` is no positive multiple of 4.
    """
    if num_atoms < 4 or num_atoms % 4:
        raise InputError(f"--atoms must be multiples of 4, the atoms of a cubic fcc cell, got {num_atoms}")
    cells = num_atoms // 4
    sides = ((a, b, cells // (a * b)) for a in _divisors(cells) for b in _divisors(cells // a))
    shape = min(sides, key=sum)
    atoms = bulk("Cu", cubic=True, a=LATTICE_CONSTANT).repeat(shape)
    generator = torch.Generator().manual_seed(seed)
    pos = torch.tensor(atoms.positions, dtype=torch.float32)
    return Data(
        pos=pos + RATTLE * torch.randn(pos.shape, generator=generator),
        cell=torch.tensor(atoms.cell.array, dtype=torch.float32)[None],
        pbc=torch.ones(1, 3, dtype=torch.bool),
        atomic_numbers=torch.tensor(atoms.numbers, dtype=torch.int64),
    )


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def bench_model(
    config: Config,
    sizes: tuple[int, ...],
    repeats: int = 3,
    progress: Callable[[str], None] = lambda _: None,
) -> ModelBench:
    """Measures a training step at each number of atoms.

    Args:
        config: the model and its radius graph; what it says of data sets and training is not used.
        sizes: numbers of atoms, two different ones at least.
        repeats: steps of which the best counts, after two that do not.
        progress: receives a line of text before each part.

    Raises:
        InputError: sizes that make no crystal, or fewer than two of them.
    """
    if len({*sizes}) < 2:
        raise InputError(f"--atoms must hold two different numbers at least, got {list(sizes)}")
    torch.manual_seed(config.seed)
    model = model_from_config(config)
    transform = build_transform(config.data, training=False)
    steps: list[ModelStep] = []
    for size in sizes:
        progress(f"{size} atoms")
        data = transform(crystal(size))

        def step(data: Data = data) -> None:
            energy, delta_pos = model(data)
            loss = energy.sum() if delta_pos is None else energy.sum() + delta_pos.sum()
            loss.backward()
            # Here and not first, so that a step frees all that it allocates.
            model.zero_grad(set_to_none=True)

        step()
        peak = peak_memory(step, torch.device("cpu"))
        steps.append(ModelStep(size, data.num_edges, min(_cpu_time(step) for _ in range(repeats)), peak))
    return ModelBench(
        tuple(steps),
        growth_exponent(sizes, [step.seconds for step in steps]),
        growth_exponent(sizes, [step.peak_bytes for step in steps]),
    )


def _cpu_time(call: Callable[[], None]) -> float:
    start = time.process_time()
    call()
    return time.process_time() - start


def result_table(result: ModelBench) -> Table:
    """What was measured, for the terminal."""
    from rich.table import Table

    table = Table(title="One training step of the model on one crystal")
    for name in ("atoms", "edges", "CPU time, s", "µs per atom", "peak memory, GiB"):
        table.add_column(name, justify="right")
    for step in result.steps:
        table.add_row(
            f"{step.num_atoms:,}",
            f"{step.num_edges:,}",
            f"{step.seconds:.3g}",
            f"{1e6 * step.seconds / step.num_atoms:.0f}",
            f"{step.peak_bytes / GIB:.2f}",
        )
    table.caption = (
        f"grows with the atoms to the power of {result.time_exponent:.2f} (time) "
        f"and {result.memory_exponent:.2f} (memory)"
    )
    return table


def run(arguments: argparse.Namespace) -> int:
    """The command: measures and prints."""
    from rich.console import Console

    config = Config() if arguments.config is None else load_config(arguments.config)
    with Console(stderr=True).status("starting") as status:
        result = bench_model(config, arguments.atoms, arguments.repeats, status.update)
    if arguments.json:
        content = {"model": asdict(config.model), "radius": config.data.radius, **asdict(result)}
        print_text(json.dumps(content) + "\n")
    else:
        print_tables(result_table(result))
    return 0
