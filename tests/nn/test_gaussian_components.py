"""Gaussian components: unit mass in any dimension, and what goes wrong is named."""

import math

import pytest
import torch

from molflt.nn.gaussian_components import GaussianComponents


@pytest.mark.parametrize(("position_dim", "points"), [(1, 401), (2, 161), (3, 61)])
def test_every_component_integrates_to_one_in_its_dimension(position_dim: int, points: int) -> None:
    std = torch.tensor([[0.2, 0.5, 0.3], [0.4, 0.25, 0.35]], dtype=torch.float64)
    mean = torch.linspace(-0.3, 0.4, 6 * position_dim, dtype=torch.float64).view(2, 3, position_dim)
    components = GaussianComponents(std, position_dim, mean).double()
    axis = torch.linspace(-4, 4, points, dtype=torch.float64)
    grid = torch.cartesian_prod(*[axis] * position_dim).view(1, -1, position_dim)
    mass = components(grid).sum(-2) * (axis[1] - axis[0]) ** position_dim
    torch.testing.assert_close(mass, torch.ones_like(mass), rtol=1e-6, atol=0)


def test_width_is_the_reciprocal_of_two_pi_std() -> None:
    components = GaussianComponents(torch.tensor([[0.1, 0.4]]), 3)
    torch.testing.assert_close(components.widths, 1 / (2 * math.pi * torch.tensor([[0.1, 0.4]])))


def test_reset_restores_changed_std_and_mean() -> None:
    components = GaussianComponents(torch.tensor([[0.1, 0.4]]), 1, torch.tensor([[[0.3], [0.2]]]))
    assert components.mean is not None
    with torch.no_grad():
        components.raw_std.add_(1.0)
        components.mean.add_(1.0)
    components.reset_parameters()
    torch.testing.assert_close(components.std, torch.tensor([[0.1, 0.4]]))
    torch.testing.assert_close(components.mean, torch.tensor([[[0.3], [0.2]]]))


def test_fixed_components_have_no_parameters_but_stay_in_the_state() -> None:
    components = GaussianComponents(torch.tensor([[0.1]]), 1, torch.tensor([[[0.3]]]), learnable=False)
    assert list(components.parameters()) == []
    assert set(components.state_dict()) == {"raw_std", "mean"}


def test_a_std_that_is_not_positive_is_named() -> None:
    with pytest.raises(ValueError, match=r"std must be positive everywhere, got a smallest value of -0\.5"):
        GaussianComponents(torch.tensor([[1.0, -0.5]]), 3)


def test_a_mean_of_another_shape_is_named() -> None:
    with pytest.raises(ValueError, match=r"mean must have shape \(1, 2, 3\)"):
        GaussianComponents(torch.ones(1, 2), 3, torch.zeros(1, 2, 2))
