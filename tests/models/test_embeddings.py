"""Element-pair Gaussians over the radius graph."""

import math

import pytest
import torch

from molflt.models.embeddings import (
    MIN_STD,
    NUM_ELEMENTS,
    AtomEmbedding,
    PairGaussians,
    edge_geometry,
    polynomial_cutoff,
    weighted_gaussians,
)


def randomised(module: torch.nn.Module, seed: int = 3) -> torch.nn.Module:
    """Float64 weights away from their special initial values."""
    generator = torch.Generator().manual_seed(seed)
    module = module.double()
    for parameter in module.parameters():
        noise = torch.rand(parameter.shape, generator=generator, dtype=torch.float64)
        parameter.data.add_(0.3 * noise)
    return module


def test_gaussians_are_the_elementwise_formula_in_value_and_derivatives():
    x = torch.linspace(-1.0, 7.0, 13, dtype=torch.float64, requires_grad=True)
    weight = torch.linspace(1.0, 0.1, 13, dtype=torch.float64, requires_grad=True)
    means = torch.linspace(0.2, 5.9, 5, dtype=torch.float64, requires_grad=True)
    stds = torch.linspace(0.7, 2.0, 5, dtype=torch.float64, requires_grad=True)
    inputs = (x, weight, means, stds)
    expected = weight[:, None] * torch.exp(-0.5 * ((x[:, None] - means) / stds) ** 2)
    torch.testing.assert_close(weighted_gaussians(*inputs), expected, rtol=1e-12, atol=1e-14)
    assert torch.autograd.gradcheck(weighted_gaussians, inputs)
    assert torch.autograd.gradgradcheck(weighted_gaussians, inputs)


def test_gaussians_of_weight_zero_vanish_with_finite_gradients():
    x = torch.tensor([1.0, 3.0], dtype=torch.float64, requires_grad=True)
    weight = torch.tensor([0.0, 1e-9], dtype=torch.float64, requires_grad=True)
    means, stds = torch.tensor([1.0, 3.0]).double(), torch.tensor([0.5, 0.5]).double()
    values = weighted_gaussians(x, weight, means, stds)
    assert values[0].abs().max() < 1e-25
    assert values[1, 1].item() == pytest.approx(1e-9)
    gradients = torch.autograd.grad(values.sum(), (x, weight))
    assert all(gradient.isfinite().all() for gradient in gradients)


def test_gaussians_keep_their_precision_in_float32_and_under_autocast():
    x, weight = torch.linspace(0.0, 12.0, 997), torch.ones(997)
    means, stds = torch.linspace(0.0, 6.0, 7), torch.full((7,), MIN_STD)
    exact = weighted_gaussians(x.double(), weight.double(), means.double(), stds.double())
    # The polynomial's terms reach (6 + 3)^2 / (2 0.05^2) = 2e4, whose float32 rounding is 1e-3.
    assert (weighted_gaussians(x, weight, means, stds) - exact).abs().max() < 2e-3
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert (weighted_gaussians(x, weight, means, stds) - exact).abs().max() < 2e-3


def test_cutoff_is_the_stated_polynomial_and_flat_at_both_ends():
    radius = 3.7
    distances = torch.linspace(0.0, 1.3 * radius, 53, dtype=torch.float64)
    u = distances / radius
    expected = torch.where(u < 1, 1 - 28 * u**6 + 48 * u**7 - 21 * u**8, 0.0)
    torch.testing.assert_close(polynomial_cutoff(distances, radius), expected, rtol=0, atol=1e-13)
    end = torch.tensor([0.0, radius], dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(polynomial_cutoff(end, radius).sum(), end, create_graph=True)
    (curvature,) = torch.autograd.grad(slope.sum(), end)
    torch.testing.assert_close(slope.detach(), torch.zeros(2, dtype=torch.float64), rtol=0, atol=1e-12)
    torch.testing.assert_close(curvature, torch.zeros(2, dtype=torch.float64), rtol=0, atol=1e-12)


def test_cutoff_is_never_negative_in_float32():
    distances = torch.linspace(0.99, 1.0, 10007) * 5.0
    assert polynomial_cutoff(distances, 5.0).min() >= 0.0


def test_node_features_are_the_published_sum_over_ordered_element_pairs(toy_structure):
    data = toy_structure(7)
    module = randomised(AtomEmbedding(channels=5, num_gaussians=11, radius=3.7))
    sender, receiver = data.edge_index
    displacement = data.pos[sender] - data.pos[receiver] + data.cell_offsets.double() @ data.cell[0]
    x, per_edge = module(data.atomic_numbers, data.tags, edge_geometry(data.edge_index, displacement, 3.7))

    layer = module.pair_gaussians
    mul = layer.pair_mul.weight.view(NUM_ELEMENTS, NUM_ELEMENTS)
    bias = layer.pair_bias.weight.view(NUM_ELEMENTS, NUM_ELEMENTS)
    summed = torch.zeros(7, 11, dtype=torch.float64)
    for e in range(data.num_edges):
        j, i = int(sender[e]), int(receiver[e])
        z_i, z_j = data.atomic_numbers[i], data.atomic_numbers[j]
        distance = displacement[e].norm()
        stretched = mul[z_i, z_j] * distance + bias[z_i, z_j]
        bumps = torch.exp(-0.5 * ((stretched - layer.means) / layer.stds) ** 2)
        u = distance / 3.7
        cutoff = 1 - 28 * u**6 + 48 * u**7 - 21 * u**8
        torch.testing.assert_close(per_edge[e], cutoff * bumps)
        summed[i] += cutoff * bumps / (math.sqrt(2 * math.pi) * layer.stds)
    expected = module.element.weight[data.atomic_numbers] + module.tag.weight[data.tags]
    torch.testing.assert_close(x, expected + summed @ module.geometry.weight.T + module.geometry.bias)


def test_pairs_are_ordered():
    layer = PairGaussians(num_gaussians=3, radius=5.0).double()
    layer.pair_bias.weight.data[29 * NUM_ELEMENTS + 8] = 0.7
    distance, one = torch.tensor([2.0], dtype=torch.float64), torch.ones(1, dtype=torch.float64)
    copper, oxygen = torch.tensor([29]), torch.tensor([8])
    shifted = weighted_gaussians(distance + 0.7, one, layer.means, layer.stds)
    torch.testing.assert_close(
        layer(distance, one, receiver_elements=copper, sender_elements=oxygen), shifted
    )
    plain = weighted_gaussians(distance, one, layer.means, layer.stds)
    torch.testing.assert_close(layer(distance, one, receiver_elements=oxygen, sender_elements=copper), plain)


@pytest.mark.parametrize("num_gaussians", [1, 2, 128, 1009])
def test_initial_gaussians_are_evenly_spaced_twice_as_wide_as_their_spacing(num_gaussians):
    layer = PairGaussians(num_gaussians, radius=6.0)
    spacing = 6.0 / num_gaussians
    expected = spacing * (0.5 + torch.arange(num_gaussians))
    torch.testing.assert_close(layer.means.detach(), expected)
    wanted = max(2.0 * spacing, MIN_STD + 0.01)
    torch.testing.assert_close(layer.stds.detach(), torch.full((num_gaussians,), wanted))


def test_gradients_are_finite_at_zero_distance():
    displacement = torch.tensor([[0.0, 0.0, 0.0], [0.3, -0.2, 0.1]], dtype=torch.float64, requires_grad=True)
    edges = edge_geometry(torch.tensor([[0, 1], [1, 0]]), displacement, 5.0)
    x, _ = randomised(AtomEmbedding(3, 5, 5.0))(torch.tensor([8, 29]), torch.tensor([0, 2]), edges)
    (gradient,) = torch.autograd.grad(x.sum(), displacement)
    torch.testing.assert_close(gradient[0], torch.zeros(3, dtype=torch.float64))
    assert gradient[1].isfinite().all()
    assert gradient[1].abs().max() > 1e-3
