"""Autocast reaches the encoder's matrix products and stops at the heads."""

import pytest
import torch

from molflt.build import build_model
from molflt.config import AttentionConfig, ModelConfig

RADIUS = 3.7


@pytest.fixture
def model():
    torch.manual_seed(0)
    attention = AttentionConfig(num_random_features=13, num_frequencies=5, num_basis=7)
    config = ModelConfig(channels=24, num_heads=3, num_layers=2, displacement_channels=6, attention=attention)
    model = build_model(config, RADIUS).eval()
    model.energy_mean.fill_(-1.75)
    model.energy_std.fill_(2.25)
    return model


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_heads_compute_in_float32_under_autocast(model, toy_structure, dtype):
    """The energy is to the last bit that of the head outside autocast on the features it was given."""
    given = []
    model.energy_head.register_forward_pre_hook(lambda head, inputs: given.append(inputs))
    data = toy_structure(11)
    with torch.no_grad():
        with torch.autocast("cpu", dtype=dtype):
            output = model(data)
        assert output.energy.dtype == output.delta_pos.dtype == torch.float32
        expected = model.energy_head(*given[0]) * 2.25 - 1.75
    assert torch.equal(output.energy, expected)


@pytest.mark.parametrize(("dtype", "digits"), [(torch.bfloat16, 2**-8), (torch.float16, 2**-11)])
def test_autocast_changes_predictions_by_its_own_rounding(model, toy_structure, dtype, digits):
    """By some, as the encoder does use it, and by no more than 16 units of the type on a scale of 2.25 eV."""
    data = toy_structure(11)
    with torch.no_grad():
        exact = model(data)
        with torch.autocast("cpu", dtype=dtype):
            output = model(data)
    error = (output.energy - exact.energy).abs().item()
    assert 0 < error < 16 * digits * 2.25
    assert 0 < (output.delta_pos - exact.delta_pos).abs().max() < 16 * digits
