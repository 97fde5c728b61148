"""The model's bench at toy size, its crystals, and what no step may allocate."""

import json

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from molflt.bench.model import bench_model, crystal
from molflt.build import build_transform
from molflt.checkpoint import model_from_config
from molflt.cli import main
from molflt.config import Config
from molflt.errors import InputError


def tiny_config() -> Config:
    config = Config()
    model = config.model
    model.channels, model.num_heads, model.num_layers, model.ffn_channels = 8, 2, 1, 8
    model.num_gaussians, model.displacement_channels = 5, 4
    config.data.radius = 3.0
    return config


def test_crystals_are_periodic_copper_of_the_asked_size_and_density():
    for num_atoms in (4, 1000, 20000):
        data = crystal(num_atoms)
        assert data.num_nodes == num_atoms
        assert torch.linalg.det(data.cell[0]).item() == pytest.approx(num_atoms * 3.61**3 / 4, rel=1e-5)
        assert data.pbc.all()
        assert (data.atomic_numbers == 29).all()
    sides = torch.linalg.vector_norm(crystal(20000).cell[0], dim=-1)
    assert sides.max() < 2.6 * sides.min()
    with pytest.raises(InputError, match=r"must be multiples of 4, .* got 10"):
        crystal(10)


def test_steps_are_measured_at_each_size_and_exponents_fitted():
    result = bench_model(tiny_config(), (108, 256), repeats=1)
    assert [step.num_atoms for step in result.steps] == [108, 256]
    assert result.steps[1].num_edges == pytest.approx(256 * 12, rel=0.01)
    assert all(step.seconds > 0 for step in result.steps)
    assert result.steps[1].peak_bytes > 1.5 * result.steps[0].peak_bytes
    assert 0.5 < result.memory_exponent < 1.5
    with pytest.raises(InputError, match=r"two different numbers at least, got \[108, 108\]"):
        bench_model(tiny_config(), (108, 108))


def test_command_prints_a_table_or_json(capsys):
    command = ["bench", "model", "--atoms", "4,32", "--repeats", "1"]
    assert main(command) == 0
    assert "grows with the atoms to the power of" in capsys.readouterr().out
    assert main([*command, "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert [step["num_atoms"] for step in content["steps"]] == [4, 32]
    assert content["model"]["channels"] == Config().model.channels


class LargestTensor(TorchDispatchMode):
    """Elements of the largest tensor that any operation makes, forward and backward."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return result


@pytest.mark.parametrize(
    ("kind", "num_atoms", "radius"), [("flt", 8000, 6.0), ("range_separated", 2500, 3.0)]
)
def test_a_step_of_the_shipped_size_makes_no_tensor_of_n_by_n(kind, num_atoms, radius):
    """Sizes at which what every edge has (64 Gaussians, 128 channels) is less than the pairs of atoms."""
    config = Config()
    attention = config.model.attention
    attention.kind, attention.max_frequencies = kind, 32
    attention.num_random_features = {"flt": 64, "range_separated": 16}[kind]
    config.data.radius = radius
    data = build_transform(config.data, training=False)(crystal(num_atoms))
    model = model_from_config(config)
    with LargestTensor() as largest:
        energy, delta_pos = model(data)
        (energy.sum() + delta_pos.sum()).backward()
    assert data.num_edges * config.model.num_gaussians <= largest.elements < num_atoms**2
