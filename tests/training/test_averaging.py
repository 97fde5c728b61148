"""The average of weights against its definition, and its exchange with them."""

import pytest
import torch
from torch import nn

from molflt.training.averaging import WeightAverage


def parameters(*values: float) -> list[nn.Parameter]:
    return [nn.Parameter(torch.tensor([value, -value], dtype=torch.float64)) for value in values]


def test_average_follows_its_recursion():
    """Five updates equal the recursion written out, with decays 1/10, 2/11, 3/12, 0.3, 0.3."""
    weights = parameters(3.0, 5.0)
    average = WeightAverage(weights, decay=0.3)
    expected = [3.0, 5.0]
    for number in range(5):
        decay = min(0.3, (1 + number) / (10 + number))
        with torch.no_grad():
            for index, weight in enumerate(weights):
                weight.add_(torch.tensor([1.0, -1.0], dtype=torch.float64))
                expected[index] = decay * expected[index] + (1 - decay) * (weight[0].item())
        average.update()
    average.exchange()
    for weight, wanted in zip(weights, expected, strict=True):
        assert weight.tolist() == pytest.approx([wanted, -wanted], abs=1e-14)


def test_exchange_puts_the_average_into_the_weights_and_back():
    """After one exchange the weights are 0.9 x 11 + 0.1 x 7, after two every bit is as before."""
    weights = parameters(7.0)
    average = WeightAverage(weights, decay=0.5)
    with torch.no_grad():
        weights[0].copy_(torch.tensor([11.0, 13.0]))
    average.update()
    assert weights[0].tolist() == [11.0, 13.0]
    average.exchange()
    assert average.exchanged
    assert weights[0].tolist() == pytest.approx([0.1 * 7 + 0.9 * 11, 0.1 * -7 + 0.9 * 13], abs=1e-14)
    average.exchange()
    assert not average.exchanged
    assert weights[0].tolist() == [11.0, 13.0]
