"""Adam and AdamW with their schedule, as configured."""

import pytest
import torch

from molflt.config import OptimConfig
from molflt.training.optimizers import build_optimizer, build_schedule


def step_of(optimizer_name, weight_decay=0.1, fused=True):
    """A weight of 2 after one step at rate 0.5 with gradient 3, and decay."""
    weight = torch.nn.Parameter(torch.tensor([2.0]))
    config = OptimConfig(lr=0.5, weight_decay=weight_decay, optimizer=optimizer_name)
    weight.grad = torch.tensor([3.0])
    optimizer = build_optimizer([weight], config, fused)
    optimizer.step()
    assert optimizer.defaults["betas"] == (0.9, 0.98)
    return weight.item()


@pytest.mark.parametrize("fused", [True, False])
def test_weight_decay_is_apart_from_the_gradient_in_adamw_and_a_part_of_it_in_adam(fused):
    """The first step is of the rate's size, against the gradient; AdamW shrinks the weight besides."""
    assert step_of("adamw", fused=fused) == pytest.approx(2.0 * (1 - 0.5 * 0.1) - 0.5, abs=1e-6)
    assert step_of("adam", fused=fused) == pytest.approx(2.0 - 0.5, abs=1e-6)


def test_adams_decay_turns_the_step_where_it_outweighs_the_gradient():
    """A gradient of 3 and a weight of -2 with a decay of 2: their sum is -1, so the step is upwards."""
    weight = torch.nn.Parameter(torch.tensor([-2.0]))
    weight.grad = torch.tensor([3.0])
    build_optimizer([weight], OptimConfig(lr=0.5, weight_decay=2.0, optimizer="adam")).step()
    assert weight.item() == pytest.approx(-1.5, abs=1e-6)


def test_the_schedule_covers_the_steps_it_is_given():
    """A tenth of 20 steps of warm-up, then linearly to zero."""
    weight = torch.nn.Parameter(torch.tensor([2.0]))
    config = OptimConfig(lr=0.3, warmup_fraction=0.1, schedule="polynomial", power=1.0)
    optimizer = build_optimizer([weight], config)
    schedule = build_schedule(optimizer, config, 20)
    rates = []
    for _ in range(20):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    expected = [0.1, 0.2, *(0.3 * (1 - step / 18) for step in range(18))]
    assert rates == pytest.approx(expected, abs=1e-12)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.0, abs=1e-15)
