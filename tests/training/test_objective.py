"""Losses and schedules against hand-computed values."""

import itertools
import math

import pytest
import torch

from molflt.training.objective import delta_pos_loss, energy_loss, learning_rate_factor, linear_weight


def test_energy_loss_is_the_mean_error_in_units_of_the_targets_spread():
    """Errors of 1 and 2 eV with a spread of 3 eV give 0.5."""
    loss = energy_loss(torch.tensor([2.0, -3.0]), torch.tensor([1.0, -1.0]), torch.tensor(3.0))
    assert loss.item() == 0.5


def test_delta_pos_loss_leaves_fixed_atoms_out():
    """The value is the mean over free atoms' components, and fixed atoms get no gradient."""
    delta_pos = torch.tensor(
        [[1.0, -2.0, 3.0], [1e30, 0.0, 0.0], [0.0, 0.0, 6.0]], dtype=torch.float64, requires_grad=True
    )
    fixed = torch.tensor([False, True, False])
    loss = delta_pos_loss(delta_pos, torch.zeros(3, 3, dtype=torch.float64), fixed, torch.tensor(0.5))
    assert loss.item() == pytest.approx((6.0 + 6.0) / 3 / 2 / 0.5, abs=1e-12)
    loss.backward()
    assert delta_pos.grad is not None
    assert delta_pos.grad[1].eq(0).all()
    assert delta_pos.grad[0].ne(0).all()


def test_delta_pos_loss_of_a_batch_without_free_atoms_is_zero():
    """No division by zero, in value and gradient."""
    delta_pos = torch.ones(2, 3, requires_grad=True)
    loss = delta_pos_loss(delta_pos, torch.zeros(2, 3), torch.tensor([True, True]), torch.tensor(1.0))
    loss.backward()
    assert loss.item() == 0.0
    assert delta_pos.grad is not None
    assert delta_pos.grad.eq(0).all()


def test_linear_weight_goes_from_its_first_to_its_last_value():
    """15 at the first of 29 steps, 8 in the middle, 1 at the last, and no further beyond it."""
    weights = [linear_weight(step, 29, (15.0, 1.0)) for step in (0, 14, 28, 29)]
    assert weights == [15.0, 8.0, 1.0, 1.0]
    assert linear_weight(0, 1, (15.0, 1.0)) == 15.0


def test_learning_rate_rises_linearly_and_falls_with_a_cosine_to_zero():
    """Warm-up of 4 of 104 steps: fifths, then the peak, half of it midway, zero after the last step."""
    factors = [learning_rate_factor(step, 104, 4) for step in range(105)]
    assert factors[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0], abs=1e-15)
    assert factors[54] == pytest.approx(0.5, abs=1e-15)
    assert factors[29] == pytest.approx(0.5 + 0.5 * math.sqrt(0.5), abs=1e-15)
    assert factors[104] == pytest.approx(0.0, abs=1e-15)
    assert 0 < factors[103] < 1e-3
    assert all(later < earlier for earlier, later in itertools.pairwise(factors[4:]))


def test_learning_rate_without_warmup_starts_at_its_peak():
    """And a single step has the full rate."""
    assert learning_rate_factor(0, 17, 0) == 1.0
    assert learning_rate_factor(0, 1, 0) == 1.0


def test_learning_rate_falls_with_a_power_of_what_is_left():
    """Halfway through the decay of 100 steps: a half, and an eighth for the third power; zero at the end."""
    for power, half in ((1.0, 0.5), (3.0, 0.125)):
        factors = [learning_rate_factor(step, 104, 4, "polynomial", power) for step in range(106)]
        assert factors[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0], abs=1e-15)
        assert factors[54] == pytest.approx(half, abs=1e-15)
        assert factors[104:] == [0.0, 0.0]


def test_a_constant_learning_rate_only_warms_up():
    factors = [learning_rate_factor(step, 17, 2, "constant") for step in range(18)]
    assert factors == pytest.approx([1 / 3, 2 / 3, *[1.0] * 16], abs=1e-15)
