"""`molflt bench graphs`: molflt's periodic radius graph beside ASE's `neighbor_list`, on one crystal.

Both find the same edges (checked before anything is timed) and return sender, receiver, offsets and distance
of each; molflt's are sorted besides. They run in one process in turn, and their ratio is taken round by
round.
"""

from __future__ import annotations

import math
import time
from dataclasses import asdict, dataclass
from typing import Any

import ase.build
import numpy as np
import torch
from ase import Atoms
from ase.neighborlist import neighbor_list
from rich.table import Table

from molflt.bench.measure import Spread, paired_ratio, spread, time_alternating
from molflt.data.graphs import radius_graph
from molflt.errors import InputError


@dataclass(frozen=True)
class GraphBench:
    """What was measured, and on what."""

    num_atoms: int
    num_edges: int
    radius: float
    """Å."""
    clock: str
    molflt: Spread
    """Seconds."""
    ase: Spread
    """Seconds."""
    ratio: Spread
    """ASE's time over molflt's, of the same rounds."""


def crystal(num_atoms: int, seed: int = 0) -> Atoms:
    """A nearly cubic cell of fcc copper, its atoms displaced by 0.05 Å, less what exceeds `num_atoms`."""
    layers = max(round((num_atoms / 4) ** (1 / 3)), 1)
    atoms = ase.build.bulk("Cu", cubic=True) * (layers, layers, math.ceil(num_atoms / 4 / layers**2))
    atoms.rattle(0.05, seed=seed)
    return atoms[:num_atoms]


def bench_graphs(num_atoms: int, radius: float, repeats: int, clock: str = "cpu") -> GraphBench:
    """Time both, `repeats` rounds.

    Args:
        num_atoms: in the cell.
        radius: cutoff, Å.
        repeats: rounds.
        clock: `cpu` for the process's CPU time, `wall` for time passed.

    Raises:
        InputError: the two do not find the same edges.
    """
    atoms = crystal(num_atoms)
    pos, cell, pbc = (torch.from_numpy(array) for array in (atoms.positions, atoms.cell.array, atoms.pbc))
    calls = {
        "molflt": lambda: radius_graph(pos, cell, pbc, radius),
        "ASE": lambda: neighbor_list("ijdS", atoms, radius),
    }
    (edge_index, offsets, distances), (receiver, sender, lengths, shifts) = (
        call() for call in calls.values()
    )
    ours = np.column_stack([*edge_index.numpy()[::-1], offsets.numpy()])
    theirs = np.column_stack([receiver, sender, shifts])
    order, other_order = np.lexsort(ours.T), np.lexsort(theirs.T)
    if not (
        np.array_equal(ours[order], theirs[other_order])
        and np.allclose(distances.numpy()[order], lengths[other_order], atol=1e-9)
    ):
        raise InputError(f"molflt and ASE find other edges up to {radius} Å; please report it")
    clocks = {"cpu": time.process_time, "wall": time.perf_counter}
    seconds = time_alternating(calls, repeats, torch.device("cpu"), clocks[clock])
    return GraphBench(
        num_atoms,
        len(lengths),
        radius,
        clock,
        spread(seconds["molflt"]),
        spread(seconds["ASE"]),
        paired_ratio(seconds["ASE"], seconds["molflt"]),
    )


def graph_table(result: GraphBench) -> Table:
    """The result as a table."""
    table = Table(
        title=f"{result.num_atoms} atoms, {result.num_edges} edges up to {result.radius:g} Å, "
        f"{result.clock} time"
    )
    for heading in ("", "median", "min", "max"):
        table.add_column(heading, justify="left" if not heading else "right")
    for name, values in (("molflt (ms)", result.molflt), ("ASE neighbor_list (ms)", result.ase)):
        table.add_row(name, *(f"{1e3 * value:.2f}" for value in values))
    table.add_row("ASE / molflt", *(f"{value:.1f}" for value in result.ratio))
    return table


def graph_json(result: GraphBench) -> dict[str, Any]:
    """The result as plain values."""
    return asdict(result) | {name: getattr(result, name)._asdict() for name in ("molflt", "ase", "ratio")}
