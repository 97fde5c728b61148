"""`molflt bench symmetry`: how far a model's energies change where nothing physical does.

Each change makes another description of the same structure, or of two copies of it. Models with invariant
attention answer with rounding errors, those with random frequencies as far as rotated training data taught
them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import cast

import torch
from rich.table import Table
from torch import Tensor
from torch_geometric.data import Data

from molflt.build import build_transform
from molflt.checkpoint import Checkpoint
from molflt.config import DataConfig
from molflt.data.datasets import OC20IS2RE, list_splits
from molflt.data.transforms import RandomRotation, cell_and_pbc
from molflt.errors import InputError
from molflt.evaluation.predictions import predicted_batches
from molflt.models.graphormer3d import Graphormer3D

FIELDS = ("pos", "atomic_numbers", "tags", "sid")
SHIFT = (1.7, -23.9, 11.1)
"""Å."""


@dataclass(frozen=True)
class SymmetryResult:
    """Changes of the energy per system, of one kind."""

    name: str
    num_systems: int
    """Of those asked for, the ones that this change applies to."""
    mean: float
    """Mean of |ΔE|, eV."""
    largest: float
    """eV."""


def bare(data: Data) -> Data:
    """A structure without its graph and labels; without `pbc` its cell repeats along all directions."""
    cell, pbc = cell_and_pbc(data)
    kept = {name: data[name] for name in FIELDS if name in data}
    return Data(**kept, cell=cell.unsqueeze(0), pbc=pbc.unsqueeze(0))


def changed(data: Data, **fields: Tensor) -> Data:
    """A copy with other fields."""
    data = data.clone()
    for name, value in fields.items():
        data[name] = value
    return data


def translated(data: Data) -> Data:
    """All atoms moved alike, out of the cell."""
    return changed(data, pos=data["pos"] + torch.tensor(SHIFT))


def in_other_cells(data: Data) -> Data:
    """The first and the last atom given in other cells, also along the third vector where it is periodic."""
    cell, pos = data["cell"][0], data["pos"].clone()
    pos[-1] += 2 * cell[0] - cell[1] + cell[2] * data["pbc"][0, 2]
    pos[0] -= cell[1]
    return changed(data, pos=pos)


def in_another_basis(data: Data) -> Data:
    """The same lattice by other cell vectors: a + b, b, c - a (c stays where it is open)."""
    cell = data.cell.clone()
    if bool(data.pbc[0, 2]):
        cell[0, 2] -= cell[0, 0]
    cell[0, 0] += cell[0, 1]
    return changed(data, cell=cell)


def doubled(data: Data, axis: int = 0) -> Data:
    """Two cells as one."""
    cell = data.cell.clone()
    cell[0, axis] *= 2
    repeated = {name: data[name].repeat(2) for name in ("atomic_numbers", "tags") if name in data}
    return changed(
        data, pos=torch.cat((data["pos"], data["pos"] + data["cell"][0, axis])), cell=cell, **repeated
    )


def slab(data: Data, height: float = 1.0) -> Data:
    """Open along the third vector, `height` times as long."""
    cell = data.cell.clone()
    cell[0, 2] *= height
    return changed(data, cell=cell, pbc=torch.tensor([[True, True, False]]))


def in_plane(data: Data) -> bool:
    """Whether the structure repeats along its first two vectors, as slabs and crystals do."""
    return bool(data.pbc[0, :2].all())


def energies(model: Graphormer3D, structures: Sequence[Data], config: DataConfig) -> Tensor:
    """`[S]`, eV, of structures in batches; their graphs are made here."""
    transform = build_transform(config, training=False)
    prepared = [transform(data) for data in structures]
    return torch.cat([energy for _, energy in predicted_batches(model, prepared, config.batch_size)])


@dataclass(frozen=True)
class Symmetry:
    """One kind of change that leaves energies as they are."""

    name: str
    change: Callable[[Data], Data]
    applies: Callable[[Data], bool] = lambda _: True
    before: Callable[[Data], Data] | None = None
    """What the changed one is compared with, if not with the structure as it is."""
    copies: int = 1
    """Of the structure, that the changed one consists of."""


def symmetries(seed: int) -> tuple[Symmetry, ...]:
    """All of them; `seed` draws the rotations."""
    rotate = RandomRotation(generator=torch.Generator().manual_seed(seed))
    return (
        Symmetry("rotation of cell and positions", rotate),
        Symmetry("translation", translated),
        Symmetry("atoms given in other cells", in_other_cells, in_plane),
        Symmetry("other vectors of the same lattice", in_another_basis, in_plane),
        Symmetry("two cells as one, against twice", doubled, in_plane, copies=2),
        Symmetry("1.7 times the height, open above", partial(slab, height=1.7), in_plane, slab),
    )


def bench_symmetry(
    checkpoint: Checkpoint,
    root: str | None = None,
    split: str | None = None,
    num_systems: int = 96,
    seed: int = 0,
    progress: Callable[[str], None] = lambda _: None,
) -> list[SymmetryResult]:
    """Energies of a data set's systems beside those of the same systems described otherwise.

    Args:
        checkpoint: the model, and how its graphs are made.
        root: the data; by default what it was trained on.
        split: by default the first that it was not trained on, or the root itself where it has none.
        num_systems: how many, spread over the split.
        seed: of the rotations.
        progress: receives a line of text before each change.

    Raises:
        InputError: data that are not there, or have fewer systems.
    """
    config = replace(checkpoint.config.data, root=root or checkpoint.config.data.root)
    if split is None:
        split = next((name for name in list_splits(config.root) if name != config.train_split), None)
    dataset = OC20IS2RE(config.root, split)
    if num_systems > len(dataset):
        raise InputError(f"{config.root} has {len(dataset)} systems to take; lower --systems {num_systems}")
    step = len(dataset) // num_systems
    structures = [bare(cast("Data", dataset[index * step])) for index in range(num_systems)]
    # What is the same for every system, however many cells it has, is left out.
    offset = checkpoint.model.energy_mean.double().cpu()

    def found(described: Sequence[Data]) -> Tensor:
        return energies(checkpoint.model, described, config).double() - offset

    progress("as they are")
    plain = found(structures)
    results = []
    for symmetry in symmetries(seed):
        progress(symmetry.name)
        rows = [row for row, data in enumerate(structures) if symmetry.applies(data)]
        if not rows:
            continue
        concerned = [structures[row] for row in rows]
        before = found([symmetry.before(data) for data in concerned]) if symmetry.before else plain[rows]
        after = found([symmetry.change(data) for data in concerned])
        change = (after - symmetry.copies * before).abs()
        results.append(SymmetryResult(symmetry.name, len(rows), change.mean().item(), change.max().item()))
    return results


def symmetry_table(results: Sequence[SymmetryResult]) -> Table:
    """A row per change."""
    table = Table(title="Change of the energy of a system")
    for heading in ("", "mean, meV", "largest, meV", "systems"):
        table.add_column(heading, justify="right" if heading else "left")
    for result in results:
        table.add_row(
            result.name, f"{1e3 * result.mean:.3f}", f"{1e3 * result.largest:.3f}", str(result.num_systems)
        )
    return table
