"""Shift-invariant kernels: each is the Fourier transform of its spectral density, from which it draws."""

import math
from functools import partial

import pytest
import torch
from scipy.special import j0

from molflt.nn.kernels import GaussianKernel, LaplacianKernel, MaternKernel, ShiftInvariantKernel, safe_norm

RADIAL = {
    "gaussian": GaussianKernel,
    "matern_12": partial(MaternKernel, smoothness=0.5),
    "matern_32": partial(MaternKernel, smoothness=1.5),
    "matern_52": partial(MaternKernel, smoothness=2.5),
}
ALL = RADIAL | {"laplacian": LaplacianKernel}


def half_line(count: int, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Midpoint nodes and weights on (0, inf) by rho = scale tan(pi t / 2), good for algebraic tails."""
    angle = 0.5 * math.pi * (torch.arange(count, dtype=torch.float64) + 0.5) / count
    return scale * angle.tan(), 0.5 * math.pi / count * scale / angle.cos().square()


@pytest.mark.parametrize("position_dim", [1, 2, 3])
@pytest.mark.parametrize("name", RADIAL)
def test_spectral_density_of_a_radial_kernel_has_unit_mass(name: str, position_dim: int) -> None:
    kernel = RADIAL[name](2, position_dim, torch.tensor([0.7, 1.9])).double()
    rho, weights = half_line(2000, 0.2)
    points = torch.zeros(1, len(rho), position_dim, dtype=torch.float64)
    points[..., -1] = rho
    area = 2 * math.pi ** (position_dim / 2) / math.gamma(position_dim / 2) * rho ** (position_dim - 1)
    mass = (kernel.log_spectral_density(points).exp() * area * weights).sum(-1)
    torch.testing.assert_close(mass, torch.ones_like(mass), rtol=1e-6, atol=0)


@pytest.mark.parametrize("position_dim", [1, 2, 3])
@pytest.mark.parametrize("name", ["gaussian", "matern_52"])
def test_a_radial_kernel_is_the_transform_of_its_density(name: str, position_dim: int) -> None:
    kernel = RADIAL[name](2, position_dim, torch.tensor([0.7, 1.9])).double()
    rho, weights = half_line(4000, 0.2)
    points = torch.zeros(1, len(rho), position_dim, dtype=torch.float64)
    points[..., 0] = rho
    area = 2 * math.pi ** (position_dim / 2) / math.gamma(position_dim / 2) * rho ** (position_dim - 1)
    distance = torch.tensor([0.3, 1.1, 2.3], dtype=torch.float64)
    phase = 2 * math.pi * distance.unsqueeze(-1) * rho
    wave = {1: phase.cos(), 2: torch.from_numpy(j0(phase.numpy())), 3: torch.sinc(phase / math.pi)}[
        position_dim
    ]
    density = kernel.log_spectral_density(points).exp() * area * weights
    x = torch.zeros(3, position_dim, dtype=torch.float64)
    x[:, -1] = distance
    torch.testing.assert_close(kernel(x), wave @ density.mT, rtol=0, atol=1e-5)


def test_laplacian_is_a_product_of_transforms_of_cauchy_densities() -> None:
    kernel = LaplacianKernel(1, 2, 0.8).double()
    points = torch.tensor([[[0.3, -0.7], [0.0, 0.1]]], dtype=torch.float64)
    gamma = 1 / (2 * math.pi * 0.8)
    cauchy = 1 / (math.pi * gamma * (1 + (points / gamma).square()))
    torch.testing.assert_close(kernel.log_spectral_density(points).exp(), cauchy.prod(-1), rtol=1e-6, atol=0)
    x = torch.tensor([[0.5, -1.5]], dtype=torch.float64)
    torch.testing.assert_close(
        kernel(x), torch.full((1, 1), math.exp(-2.0 / 0.8)).double(), rtol=1e-6, atol=0
    )


@pytest.mark.parametrize("position_dim", [1, 3])
@pytest.mark.parametrize("name", ALL)
def test_draws_follow_the_spectral_density(name: str, position_dim: int) -> None:
    # The mean of cos(2 pi x.xi) over draws is K(x); 4 standard errors of a mean of numbers in [-1, 1].
    kernel: ShiftInvariantKernel = ALL[name](2, position_dim, torch.tensor([0.7, 1.9])).double()
    draws = kernel.draw_unit_frequencies(20011, torch.Generator().manual_seed(0))
    frequencies = draws / kernel.length[:, None, None]
    x = torch.linspace(-0.9, 1.3, 5 * position_dim, dtype=torch.float64).view(5, position_dim)
    estimate = (2 * math.pi * x @ frequencies.mT).cos().mean(-1).mT
    assert (estimate - kernel(x)).abs().max() < 4 * 20011**-0.5


@pytest.mark.parametrize("name", ALL)
def test_kernel_is_one_at_zero_with_finite_gradients(name: str) -> None:
    kernel = ALL[name](2, 3, 1.3)
    x = torch.zeros(5, 3, requires_grad=True)
    value = kernel(x)
    assert torch.equal(value, torch.ones(5, 2))
    value.sum().backward()
    assert x.grad is not None
    assert x.grad.isfinite().all()
    assert kernel.raw_length.grad.isfinite().all()


def test_safe_norm_equals_the_norm_away_from_zero() -> None:
    x = torch.randn(7, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(safe_norm(x), x.norm(dim=-1), rtol=1e-14, atol=0)


def test_bad_arguments_are_named() -> None:
    with pytest.raises(ValueError, match=r"smoothness must be 0.5, 1.5 or 2.5, got 2"):
        MaternKernel(1, 3, smoothness=2.0)
    with pytest.raises(ValueError, match="length must be positive, got -1"):
        GaussianKernel(1, 3, -1.0)
    with pytest.raises(ValueError, match=r"length must be a number or have shape \[2\], got \[3\]"):
        GaussianKernel(2, 3, torch.ones(3))
