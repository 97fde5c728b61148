"""Toy structures, toy LMDBs and assertions for tests of code that works with molflt's data.

The toys are small, seeded and shaped like OC20's: sizes are primes, so that swapped axes show, and edges obey
the edge convention.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Batch, Data

from molflt.data.lmdb_writer import write_entries
from molflt.data.pickle_writer import Layout, dump_record

_ELEMENTS = (1, 6, 8, 13, 29, 47, 78)
_EDGE_RADIUS = 3.1


def toy_record(
    seed: int = 0, num_atoms: int = 7, labels: bool = True, tags: bool = True, edges: bool = True
) -> dict[str, Any]:
    """One periodic structure with the raw fields and types of an OC20 record.

    Args:
        seed: fixes everything; also the `sid`, 1000 + seed.
        num_atoms: atoms, of which the last is the adsorbate and the first two are fixed.
        labels: with `y_init`, `y_relaxed`, `pos_relaxed`; test sets have none.
        tags: with `tags`.
        edges: with `edge_index`, `cell_offsets`, `distances` (all images within 3.1 Å).

    Returns:
        Field name to tensor or number.
    """
    generator = torch.Generator().manual_seed(seed)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator)

    cell = torch.tensor([[5.0, 0.0, 0.0], [1.5, 4.0, 0.0], [0.0, 0.5, 11.0]]) + 0.3 * uniform(3, 3)
    grid = torch.tensor(list(itertools.product(range(2), range(2), range(-(-num_atoms // 4)))))[:num_atoms]
    pos = (grid + 0.2 * uniform(num_atoms, 3)) @ (cell / torch.tensor([[2.0], [2.0], [5.0]]))
    picked = torch.randint(len(_ELEMENTS), (num_atoms,), generator=generator)
    layer = torch.arange(num_atoms)
    record: dict[str, Any] = {
        "pos": pos,
        "cell": cell[None],
        "atomic_numbers": torch.tensor(_ELEMENTS)[picked].float(),
        "natoms": num_atoms,
        "fixed": (layer < 2).float(),
        "sid": 1000 + seed,
    }
    if tags:
        record["tags"] = torch.where(layer == num_atoms - 1, 2, torch.where(layer < num_atoms // 2, 0, 1))
    if labels:
        record["y_init"], record["y_relaxed"] = (8 * uniform(2) - 6).tolist()
        record["pos_relaxed"] = pos + 0.2 * (uniform(num_atoms, 3) - 0.5) * (1 - record["fixed"][:, None])
    if edges:
        record |= _edges(pos, cell)
    return record


def write_toy_lmdb(
    path: str | os.PathLike[str],
    num_records: int = 5,
    layout: Layout = "pyg2",
    length: int | bool = True,
    first_seed: int = 0,
    **fields: bool,
) -> Path:
    """Write a toy LMDB of `toy_record`s with 5, 7, 11, 13 and 17 atoms in turn.

    Args:
        path: the file to make.
        num_records: records.
        layout: `pyg1` as in OC20's own files, or `pyg2`.
        length: store the right `length` (True), none (False), or this wrong one.
        first_seed: seed of the first record; the others count on.
        **fields: `labels`, `tags`, `edges` of `toy_record`.

    Returns:
        `path`.
    """
    records = toy_records(num_records, first_seed, **fields)
    write_entries(path, (dump_record(record, layout) for record in records), length)
    return Path(path)


def toy_records(num_records: int = 5, first_seed: int = 0, **fields: bool) -> list[dict[str, Any]]:
    """The records that `write_toy_lmdb` writes."""
    sizes = itertools.cycle((5, 7, 11, 13, 17))
    return [toy_record(first_seed + n, next(sizes), **fields) for n in range(num_records)]


def assert_same_sample(sample: Data, expected: Data) -> None:
    """Require the same fields with equal values and types."""
    assert set(sample.keys()) == set(expected.keys()), (
        f"fields {sorted(sample.keys())} are not {sorted(expected.keys())}"
    )
    for name in expected.keys():  # noqa: SIM118 (iterating a Data gives pairs)
        value, wanted = sample[name], expected[name]
        if isinstance(wanted, Tensor):
            assert value.dtype == wanted.dtype, f"{name}: {value.dtype} is not {wanted.dtype}"
            assert torch.equal(value, wanted), f"{name}: {value} is not {wanted}"
        else:
            assert value == wanted, f"{name}: {value} is not {wanted}"


def assert_batch_holds(batch: Batch, samples: Sequence[Data]) -> None:
    """Require that a batch takes apart into exactly these samples."""
    parts = batch.to_data_list()
    assert len(parts) == len(samples), f"{len(parts)} samples in the batch, expected {len(samples)}"
    for part, sample in zip(parts, samples, strict=True):
        assert isinstance(part, Data)
        assert_same_sample(part, sample)


def assert_edge_convention(data: Data, tolerance: float = 1e-5) -> None:
    """Require |pos[edge_index[0]] - pos[edge_index[1]] + cell_offsets @ cell| = distances, within Å."""
    source, target = data["edge_index"]
    displacement = data["pos"][source] - data["pos"][target] + data["cell_offsets"].float() @ data["cell"][0]
    worst = (displacement.norm(dim=1) - data["distances"]).abs().max().item()
    assert worst <= tolerance, f"an edge's displacement differs from its distance by {worst:.2e} Å"


def _edges(pos: Tensor, cell: Tensor) -> dict[str, Tensor]:
    offsets = torch.tensor(list(itertools.product((-1, 0, 1), repeat=3)))
    displacement = pos[:, None, None] - pos[None, :, None] + (offsets.float() @ cell)[None, None]
    distances = displacement.norm(dim=-1)
    source, target, image = torch.nonzero((distances < _EDGE_RADIUS) & (distances > 1e-6), as_tuple=True)
    return {
        "edge_index": torch.stack([source, target]),
        "cell_offsets": offsets[image],
        "distances": distances[source, target, image],
    }
