"""Gaussian samplers: densities, correlations, explicit randomness, gradients, errors."""

import math

import pytest
import torch
from torch import nn

from molflt.nn.frequencies import (
    FrequencySampler,
    GaussianFrequencies,
    OrthogonalGaussianFrequencies,
    SobolGaussianFrequencies,
    orthogonal_gaussian_noise,
    resample_,
    sobol_gaussian_noise,
)

KINDS = [GaussianFrequencies, OrthogonalGaussianFrequencies, SobolGaussianFrequencies]


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize(("position_dim", "points"), [(1, 401), (2, 161), (3, 71)])
def test_density_is_normalised_in_all_dimensions(position_dim: int, points: int) -> None:
    std = torch.linspace(0.2, 0.6, 2 * position_dim).view(2, position_dim)
    sampler = GaussianFrequencies(2, 5, position_dim, std).double()
    axis = torch.linspace(-4, 4, points, dtype=torch.float64)
    grid = torch.cartesian_prod(*[axis] * position_dim).view(1, -1, position_dim)
    mass = sampler.sampling_density(grid).sum(-1) * (axis[1] - axis[0]) ** position_dim
    torch.testing.assert_close(mass, torch.ones_like(mass), rtol=1e-6, atol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_quadrature_weight_is_one_over_r_times_density(kind: type[GaussianFrequencies]) -> None:
    sampler = kind(2, 7, 3, std=torch.tensor([0.2, 0.7])).double()
    frequencies, weights = sampler()
    std = torch.tensor([0.2, 0.7], dtype=torch.float64)
    square = frequencies.square().sum(-1) / std.square().unsqueeze(-1)
    density = (2 * math.pi * std.square().unsqueeze(-1)) ** -1.5 * (-0.5 * square).exp()
    torch.testing.assert_close(weights, 1 / (7 * density), rtol=1e-6, atol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_each_frequency_by_itself_is_gaussian_of_the_given_std(kind: type[GaussianFrequencies]) -> None:
    # 4 standard errors of the second and fourth moments of 3,001 normal numbers per dimension.
    std = torch.tensor([0.5, 2.0, 1.0])
    sampler = kind(3001, 5, 3, std.expand(3001, 3), generator=seeded(0)).double()
    scaled = sampler.frequencies[:, 3] / std
    error = 4 * 3001**-0.5
    assert scaled.mean(0).abs().max() < error
    assert (scaled.square().mean(0) - 1).abs().max() < error * math.sqrt(2)
    assert (scaled.pow(4).mean(0) - 3).abs().max() < error * math.sqrt(96)


def test_orthogonal_frequencies_are_orthogonal_within_blocks_and_of_chi_distributed_length() -> None:
    noise = orthogonal_gaussian_noise(2003, 7, 3, seeded(1))
    gram = noise @ noise.mT
    blocks = torch.arange(7) // 3
    same_block = (blocks.unsqueeze(0) == blocks.unsqueeze(1)) & ~torch.eye(7, dtype=torch.bool)
    assert gram[:, same_block].abs().max() < 1e-12
    assert gram[:, ~same_block].abs().min() > 0
    # Squared lengths are chi-square with 3 degrees of freedom: mean 3, variance 6.
    assert (noise.square().sum(-1).mean() - 3).abs() < 4 * (6 / (2003 * 7)) ** 0.5


def test_sobol_points_fill_every_dyadic_interval_of_every_dimension_once() -> None:
    noise = sobol_gaussian_noise(3, 64, 5, seeded(2))
    uniform = torch.special.ndtr(noise)
    cells = (uniform * 64).floor().long().sort(dim=1).values
    assert torch.equal(cells, torch.arange(64).view(1, -1, 1).expand(3, -1, 5))
    assert not torch.equal(noise[0], noise[1])


def test_sobol_integrates_a_smooth_function_better_than_independent_draws() -> None:
    def rms_error(kind: type[GaussianFrequencies]) -> float:
        frequencies = kind(101, 256, 2, std=1.0, generator=seeded(3)).double().frequencies
        return (frequencies.cos().prod(-1).mean(-1) - math.exp(-1)).square().mean().sqrt().item()

    assert rms_error(SobolGaussianFrequencies) < 0.2 * rms_error(GaussianFrequencies)


@pytest.mark.parametrize("kind", KINDS)
def test_draws_come_from_the_generator_and_change_only_on_resample(kind: type[GaussianFrequencies]) -> None:
    sampler = kind(2, 5, 3, generator=seeded(4))
    first = sampler.frequencies.clone()
    torch.manual_seed(0)
    sampler.train()
    torch.testing.assert_close(sampler().frequencies, first, rtol=0, atol=0)
    sampler.eval()
    torch.testing.assert_close(sampler().frequencies, first, rtol=0, atol=0)
    sampler.resample(seeded(5))
    assert not torch.equal(sampler.frequencies, first)
    sampler.resample(seeded(4))
    torch.testing.assert_close(sampler.frequencies, first, rtol=0, atol=0)


def test_frequencies_survive_a_state_dict_round_trip() -> None:
    saved, other = GaussianFrequencies(2, 5, 3, std=0.3), GaussianFrequencies(2, 5, 3, std=0.7)
    other.load_state_dict(saved.state_dict())
    for ours, theirs in zip(saved(), other(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


@pytest.mark.parametrize("per_dimension", [False, True])
def test_gradients_of_std_through_frequencies_and_density_are_exact(per_dimension: bool) -> None:
    sampler = GaussianFrequencies(2, 5, 3, std=0.3, per_dimension=per_dimension).double()

    def sample(raw_std: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(torch.func.functional_call(sampler, {"raw_std": raw_std}, ()))

    raw_std = torch.randn(sampler.raw_std.shape, dtype=torch.float64, generator=seeded(6)).requires_grad_()
    assert torch.autograd.gradcheck(sample, raw_std)


def test_a_fixed_std_is_a_buffer_and_a_learnable_one_a_parameter_per_head_or_dimension() -> None:
    assert list(GaussianFrequencies(5, 2, 3, learnable=False).parameters()) == []
    assert GaussianFrequencies(5, 2, 3).raw_std.numel() == 5
    assert GaussianFrequencies(5, 2, 3, per_dimension=True).raw_std.numel() == 15


def test_tiny_std_keeps_weights_and_gradients_finite_in_float32() -> None:
    sampler = GaussianFrequencies(2, 17, 3, std=1e-4)
    frequencies, weights = sampler()
    (frequencies.sum() + weights.log().sum()).backward()
    assert weights.isfinite().all()
    assert (weights > 0).all()
    assert sampler.raw_std.grad is not None
    assert sampler.raw_std.grad.isfinite().all()


def test_resample_reaches_every_holder_of_draws_once() -> None:
    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.count = 0

        def resample(self, generator: torch.Generator | None = None) -> None:
            self.count += 1

    counter, sampler = Counter(), GaussianFrequencies(2, 5, 3)
    before = sampler.base_noise.clone()
    resample_(nn.ModuleList([nn.Sequential(counter, sampler), counter]), seeded(7))
    assert counter.count == 1
    assert not torch.equal(sampler.base_noise, before)


def test_resample_twice_from_one_seed_gives_equal_draws_in_a_whole_model() -> None:
    models = [nn.ModuleList([GaussianFrequencies(2, 5, 3), SobolGaussianFrequencies(2, 5, 3)]) for _ in "ab"]
    for model in models:
        resample_(model, seeded(8))
    for first, second in zip(models[0].buffers(), models[1].buffers(), strict=True):
        torch.testing.assert_close(first, second, rtol=0, atol=0)


def test_reset_restores_std() -> None:
    sampler = GaussianFrequencies(2, 5, 3, std=0.3)
    with torch.no_grad():
        sampler.raw_std.add_(1.0)
    sampler.reset_parameters()
    torch.testing.assert_close(sampler.std, torch.full((2, 3), 0.3))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_heads": 0}, "num_heads must be at least 1, got 0"),
        ({"num_frequencies": 0}, "num_frequencies must be at least 1, got 0"),
        ({"position_dim": -1}, "position_dim must be at least 1, got -1"),
        ({"std": 0.0}, r"std must be positive, got 0\.0"),
        ({"std": torch.ones(3)}, r"std must be a number or have shape \[2\] or \[2, 3\], got \[3\]"),
    ],
)
def test_bad_arguments_are_named(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GaussianFrequencies(**{"num_heads": 2, "num_frequencies": 5, "position_dim": 3} | arguments)


def test_a_sampler_without_density_says_so() -> None:
    with pytest.raises(NotImplementedError, match="has no sampling density"):
        FrequencySampler(1, 1, 1).sampling_density(torch.zeros(1, 1, 1))
