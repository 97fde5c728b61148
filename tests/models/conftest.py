"""Toy structures for the model tests: small, periodic, in float64, with a radius graph."""

import pytest
import torch
from torch_geometric.data import Data

from molflt.data.graphs import radius_graph

RADIUS = 3.7


def toy_structure(num_atoms: int, seed: int = 0, radius: float = RADIUS) -> Data:
    """Atoms of three elements at random in a skewed cell, periodic along a and b."""
    generator = torch.Generator().manual_seed(seed)
    cell = torch.tensor([[4.1, 0.0, 0.3], [1.7, 5.3, 0.0], [0.2, 0.4, 17.0]], dtype=torch.float64)
    pos = torch.rand(num_atoms, 3, generator=generator, dtype=torch.float64)
    pos = pos @ (cell * torch.tensor([1.0, 1.0, 0.4])[:, None])
    data = Data(
        pos=pos,
        cell=cell[None],
        pbc=torch.tensor([[True, True, False]]),
        atomic_numbers=torch.tensor([1, 8, 29])[torch.randint(0, 3, (num_atoms,), generator=generator)],
        tags=torch.arange(num_atoms) % 3,
    )
    return with_graph(data, radius)


def with_graph(data: Data, radius: float = RADIUS) -> Data:
    """`data` with the radius graph of its present positions."""
    data = data.clone()
    data.edge_index, data.cell_offsets, _ = radius_graph(data.pos, data.cell, data.pbc, radius)
    return data


@pytest.fixture(name="toy_structure")
def toy_structure_fixture():
    return toy_structure


@pytest.fixture(name="with_graph")
def with_graph_fixture():
    return with_graph
