"""The table of symmetries: right values for models that have them and for one that has not."""

import json
from pathlib import Path

import pytest
import torch
from torch_geometric.data import Data

from molflt import cli
from molflt.bench.symmetry import (
    SymmetryResult,
    bare,
    bench_symmetry,
    doubled,
    in_another_basis,
    in_other_cells,
    slab,
    symmetry_table,
)
from molflt.checkpoint import Checkpoint, CheckpointMetadata, load_checkpoint, model_from_config
from molflt.config import Config
from molflt.data.graphs import radius_graph
from molflt.errors import InputError
from molflt.terminal import print_tables

DATASETS = Path(__file__).parents[2] / "datasets"


def small(**attention):
    torch.manual_seed(3)
    config = Config()
    config.data.root = str(DATASETS / "oc20_sample")
    model = config.model
    model.channels, model.num_heads, model.num_layers, model.ffn_channels = 16, 2, 1, 16
    for name, value in attention.items():
        setattr(model.attention, name, value)
    return Checkpoint(config, model_from_config(config).eval(), CheckpointMetadata())


def neighbours(data):
    """Sorted distances within 3.1 Å."""
    edges = radius_graph(data.pos.double(), data.cell[0].double(), data.pbc[0], 3.1)
    return edges[2].sort().values


@pytest.mark.parametrize("other", [in_other_cells, in_another_basis])
def test_a_structure_described_otherwise_has_the_same_neighbours(other):
    generator = torch.Generator().manual_seed(1)
    data = Data(
        pos=5 * torch.rand(7, 3, generator=generator),
        cell=torch.tensor([[[4.1, 0.0, 0.3], [1.3, 5.3, 0.0], [0.2, 0.1, 6.1]]]),
        atomic_numbers=torch.arange(1, 8),
    )
    data = bare(data)
    assert data.pbc.all()
    assert len(neighbours(data)) > 7
    torch.testing.assert_close(neighbours(other(data)), neighbours(data), atol=1e-5, rtol=0)
    twice = neighbours(data).repeat_interleave(2)
    torch.testing.assert_close(neighbours(doubled(data, 1)), twice, atol=1e-5, rtol=0)
    torch.testing.assert_close(neighbours(slab(data, 1.7)), neighbours(slab(data)), atol=1e-5, rtol=0)


def test_the_shipped_model_has_every_symmetry_on_oc20(capsys):
    """Through the command, as JSON: six changes of eight systems, each below 0.1 meV."""
    words = ["bench", "symmetry", "fcc111-flt", "--data", str(DATASETS / "oc20_sample"), "--systems", "8"]
    assert cli.main([*words, "--json"]) == 0
    results = json.loads(capsys.readouterr().out)
    assert [result["num_systems"] for result in results] == 6 * [8]
    assert all(0 <= result["mean"] <= result["largest"] < 1e-4 for result in results)


def test_random_frequencies_are_caught():
    """They know rotation and the cell an atom is given in, but not translation."""
    found = {result.name: result for result in bench_symmetry(small(), num_systems=5)}
    assert found["rotation of cell and positions"].mean > 1e-3
    assert found["atoms given in other cells"].mean > 1e-3
    assert found["translation"].largest < 1e-4


def test_the_table_is_in_mev(capsys):
    print_tables(symmetry_table([SymmetryResult("translation", 5, 0.00125, 0.5)]))
    assert "│ translation │     1.250 │      500.000 │       5 │" in capsys.readouterr().out


def test_molecules_can_be_moved_and_turned_only():
    names = [
        result.name
        for result in bench_symmetry(load_checkpoint("fcc111-flt"), str(DATASETS / "qm7"), num_systems=3)
    ]
    assert names == ["rotation of cell and positions", "translation"]


def test_more_systems_than_there_are_is_an_error():
    with pytest.raises(InputError, match="has 8 systems to take; lower --systems 9"):
        bench_symmetry(small(), num_systems=9)
