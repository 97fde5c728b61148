"""Energy MAE and EwT against hand-computed values, at the threshold, over batches and over ranks."""

import math

import pytest
import torch

from molflt.metrics import EnergyMAE, EnergyWithinThreshold


def test_energy_mae_is_the_hand_computed_mean():
    """|1 - 1.5|, |2 - 0| and |-3 + 2.75| average to 2.75 / 3."""
    metric = EnergyMAE()
    metric.update(torch.tensor([1.0, 2.0, -3.0]), torch.tensor([1.5, 0.0, -2.75]))
    assert metric.compute().item() == 2.75 / 3


def test_ewt_counts_strictly_below_the_threshold():
    """An error of exactly the threshold is not within it; the next float below is."""
    threshold = 0.02
    errors = torch.tensor(
        [0.0, math.nextafter(threshold, 0.0), threshold, math.nextafter(threshold, 1.0)], dtype=torch.float64
    )
    metric = EnergyWithinThreshold(threshold)
    metric.update(errors, torch.zeros_like(errors))
    assert metric.compute().item() == 0.5
    metric.reset()
    metric.update(-errors, torch.zeros_like(errors))
    assert metric.compute().item() == 0.5


def test_ewt_takes_another_threshold():
    """With 0.5 eV, errors of 0.25 and 0.5 give one half."""
    metric = EnergyWithinThreshold(threshold=0.5)
    metric.update(torch.tensor([0.25, 0.5]), torch.zeros(2))
    assert metric.compute().item() == 0.5


def test_ewt_refuses_a_threshold_that_is_not_positive():
    """Nothing is strictly below zero."""
    with pytest.raises(ValueError, match=r"threshold must be positive, got 0\.0"):
        EnergyWithinThreshold(0.0)


def test_sums_are_accumulated_in_float64():
    """10^4 errors of 0.1 after one of 2^24 are not lost, as they would be in float32."""
    metric = EnergyMAE()
    metric.update(torch.tensor([2.0**24]), torch.tensor([0.0]))
    for _ in range(100):
        metric.update(torch.full((100,), 0.5), torch.zeros(100))
    assert metric.compute().item() == (2.0**24 + 5000) / 10001


@pytest.mark.parametrize("make", [EnergyMAE, EnergyWithinThreshold])
def test_unequal_batches_equal_one_batch(make):
    """Batches of 7, 1, 3 and 2 systems give the value of the 13 at once, not the mean of batch means."""
    generator = torch.Generator().manual_seed(0)
    target = torch.randn(13, generator=generator, dtype=torch.float64)
    energy = target + 0.03 * torch.rand(13, generator=generator, dtype=torch.float64)
    whole, parts = make(), make()
    whole.update(energy, target)
    batch_values = []
    for energy_part, target_part in zip(energy.split([7, 1, 3, 2]), target.split([7, 1, 3, 2]), strict=True):
        batch_values.append(parts(energy_part, target_part).item())
    assert abs(parts.compute().item() - whole.compute().item()) < 1e-15
    assert abs(sum(batch_values) / 4 - whole.compute().item()) > 1e-4


@pytest.mark.parametrize("make", [EnergyMAE, EnergyWithinThreshold])
def test_two_ranks_equal_one(make):
    """torchmetrics' own synchronisation over a two-rank gather gives the value over all systems."""
    generator = torch.Generator().manual_seed(1)
    target = torch.randn(11, generator=generator)
    energy = target + 0.04 * torch.rand(11, generator=generator)
    other, whole = make(), make()
    other.update(energy[4:], target[4:])
    whole.update(energy, target)
    gathered = iter(other.metric_state.values())
    rank = make(
        dist_sync_fn=lambda state, group: [state, next(gathered)],
        distributed_available_fn=lambda: True,
    )
    rank.update(energy[:4], target[:4])
    assert abs(rank.compute().item() - whole.compute().item()) < 1e-15


@pytest.mark.parametrize("make", [EnergyMAE, EnergyWithinThreshold])
def test_shapes_that_would_broadcast_are_refused(make):
    """(N,) against (N, 1) is an error that names both shapes, and nothing is counted."""
    metric = make()
    with pytest.raises(ValueError, match=r"\(5,\) and \(5, 1\)"):
        metric.update(torch.zeros(5), torch.zeros(5, 1))
    assert metric.count == 0
